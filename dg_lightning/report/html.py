"""Pieces of HTML. Whatever comes from data or config goes through `text`."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

__all__ = ["attribute", "blocks", "details", "json_attribute", "section", "table", "text"]


def text(value: Any) -> str:
    """Return a value as text of a page.

    >>> text("<script>")
    '&lt;script&gt;'
    """
    return escape("" if value is None else str(value))


def attribute(name: str, value: Any) -> str:
    """Return an attribute with its value, and a space before it."""
    return f' {name}="{escape(str(value))}"'


def json_attribute(name: str, value: Any) -> str:
    """Return an attribute that holds a list or dict for the page's script."""
    return attribute(name, json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def table(columns: Sequence[Any], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return a table that scrolls by itself where it is too wide; first column as row heads."""
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{text(first)}</th>'
        + "".join(f"<td>{text(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    label = attribute("aria-label", caption or "Table")
    return (
        f'<div class="wide" tabindex="0" role="region"{label}><table>{said}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def section(title: str, *content: str, level: int = 2) -> str:
    """Return a part of the page with its heading, or nothing where it has no content."""
    inner = "\n".join(part for part in content if part)
    return f"<section><h{level}>{text(title)}</h{level}>\n{inner}\n</section>" if inner else ""


def details(summary: str, *content: str, opened: bool = False) -> str:
    """Return something that opens and closes, or nothing where it has no content."""
    inner = "\n".join(part for part in content if part)
    state = " open" if opened else ""
    return (
        f"<details{state}><summary>{text(summary)}</summary>\n{inner}\n</details>" if inner else ""
    )


def blocks(markdown: str) -> str:
    """Return the summary of a study, whose Markdown has few kinds of blocks, as HTML."""
    return "\n".join(_block(block) for block in markdown.strip().split("\n\n"))


def _block(block: str) -> str:
    lines = block.splitlines()
    if block.startswith("# "):
        return ""  # the page has its own title
    if block.startswith("| "):
        head, _, *body = [[cell.strip(" `") for cell in line[2:-2].split(" | ")] for line in lines]
        # What no row knows, as the paper's figures of a dataset that it has not, is left out.
        kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in body)]
        return table([head[i] for i in kept], [[line[i] for i in kept] for line in body])
    if block.startswith("- "):
        return "<ul>" + "".join(f"<li>{text(line[2:])}</li>" for line in lines) + "</ul>"
    return f"<p>{text(block)}</p>"
