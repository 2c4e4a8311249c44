"""HTML fragments. Everything from data or config must be escaped with `text`."""

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

__all__ = ["attribute", "blocks", "details", "json_attribute", "prose", "section", "table", "text"]


def text(value: Any) -> str:
    """Return a value as escaped text.

    >>> text("<script>")
    '&lt;script&gt;'
    """
    return escape("" if value is None else str(value))


def prose(value: str) -> str:
    """Return a paragraph, in which words between backticks are code.

    >>> prose("`a` < b")
    '<p><code>a</code> &lt; b</p>'
    """
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", text(value))
    return f"<p>{marked}</p>"


def attribute(name: str, value: Any) -> str:
    """Return an escaped attribute, with a leading space."""
    return f' {name}="{escape(str(value))}"'


def json_attribute(name: str, value: Any) -> str:
    """Return an attribute that holds a list or dict for the page's script."""
    return attribute(name, json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def table(columns: Sequence[Any], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return a table that scrolls if too wide; the first column holds row headers."""
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{text(first)}</th>'
        + "".join(f"<td>{text(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    caption_tag = f"<caption>{text(caption)}</caption>" if caption else ""
    label = attribute("aria-label", caption or "Table")
    return (
        f'<div class="wide" tabindex="0" role="region"{label}><table>{caption_tag}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def section(title: str, *content: str, level: int = 2) -> str:
    """Return a section with a heading, or an empty string if it has no content."""
    inner = "\n".join(part for part in content if part)
    return f"<section><h{level}>{text(title)}</h{level}>\n{inner}\n</section>" if inner else ""


def details(summary: str, *content: str, opened: bool = False) -> str:
    """Return a collapsible block, or an empty string if it has no content."""
    inner = "\n".join(part for part in content if part)
    state = " open" if opened else ""
    return (
        f"<details{state}><summary>{text(summary)}</summary>\n{inner}\n</details>" if inner else ""
    )


def blocks(markdown: str) -> str:
    """Convert the Markdown summary of a study, which has few kinds of blocks, to HTML."""
    return "\n".join(_block(block) for block in markdown.strip().split("\n\n"))


def _block(block: str) -> str:
    lines = block.splitlines()
    if block.startswith("# "):
        return ""  # the page has its own title
    if block.startswith("| "):
        head, _, *body = [[cell.strip(" `") for cell in line[2:-2].split(" | ")] for line in lines]
        # Drop empty columns, such as the paper's results for a dataset that it does not have.
        kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in body)]
        return table([head[i] for i in kept], [[line[i] for i in kept] for line in body])
    if block.startswith("- "):
        return "<ul>" + "".join(f"<li>{text(line[2:])}</li>" for line in lines) + "</ul>"
    return prose(block)
