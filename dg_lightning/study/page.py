"""report.html: the tables of a study as one page that opens from the disk."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dg_lightning.study.tables import summary_markdown

__all__ = ["report_page"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #8886; text-align: right; }
th, td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def report_page(dataset: str, rows: Sequence[Mapping[str, Any]], notes: str | None = None) -> str:
    """Return the page; every name from config or data is escaped."""
    blocks = [_block(b) for b in summary_markdown(dataset, rows, notes).strip().split("\n\n")]
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(dataset)}</title>\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(blocks) + "\n</html>\n"
    )


def _block(text: str) -> str:
    """Return one block of the summary, which has few kinds of them, as HTML."""
    lines = text.splitlines()
    if text.startswith("# "):
        return f"<h1>{escape(text[2:])}</h1>"
    if text.startswith("| "):
        head, _, *body = [line.strip("| ").split(" | ") for line in lines]
        rows = [_cells(head, "th"), *(_cells(cells, "td") for cells in body)]
        return f'<div class="wide"><table>{"".join(rows)}</table></div>'
    if text.startswith("- "):
        return "<ul>" + "".join(f"<li>{escape(line[2:])}</li>" for line in lines) + "</ul>"
    return f"<p>{escape(text)}</p>"


def _cells(cells: Sequence[str], tag: str) -> str:
    inner = "".join(f"<{tag}>{escape(cell.strip(' `'))}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"
