"""The page: one HTML file with its style, script and data, that asks no network for anything."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dg_lightning.dashboards.tables import read_rows
from dg_lightning.files import write_text
from dg_lightning.report.html import text
from dg_lightning.report.run import is_run, read_run
from dg_lightning.report.run_part import run_part
from dg_lightning.study.tables import TEXTS

__all__ = ["study_page", "write_report"]

# What the browser itself keeps the page from: everything that is not in this file.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a study or of a run, and return where it is.

    Args:
        folder: Folder of a study, of a run, or of the runs of one config, whose newest is taken.
        output: The file; `report.html` in the folder if None.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {str(folder)!r}: give one of a study or of a run.")
    rows = read_rows(folder / "results.csv")
    if rows and "variant" in rows[0]:  # a search has results, too
        page = _page_of_study(folder, rows)
    else:
        run = folder if is_run(folder) else _newest_run(folder)
        page = _page(str(run), run_part(read_run(run)))
    path = folder / "report.html" if output is None else output
    if path.suffix != ".html" and path.exists():
        raise ValueError(f"{str(path)!r} is there already and no report: name a file *.html.")
    if path.is_dir():
        raise ValueError(f"`output` must be a file, got the folder {str(path)!r}: add report.html.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def _newest_run(folder: Path) -> Path:
    """Return the newest training in a folder of runs."""
    runs = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    trained = [path for path in runs if (path / "checkpoints").is_dir()] or runs
    if not trained:
        raise ValueError(
            f"{str(folder)!r} holds neither a study (results.csv with a column variant) nor a run "
            "(metrics.csv, gates/ or config.yaml): give the folder that `study` or `fit` has named."
        )
    # The folder itself is touched by every report of it.
    return max(trained, key=lambda path: max(p.stat().st_mtime for p in _written(path)))


def _written(run: Path) -> list[Path]:
    names = ("checkpoints", "config.yaml", "metrics.csv", "gates")
    return [path for name in names if (path := run / name).exists()]


def _page_of_study(folder: Path, cells: Sequence[Mapping[str, str]]) -> str:
    described = folder / "study.json"
    about = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
    rows = [
        {key: value if key in TEXTS else _number(value) for key, value in row.items()}
        for row in cells
    ]
    name = about.get("table") or rows[0].get("dataset") or folder.name
    return study_page(folder, str(name), rows, about.get("notes"))


def study_page(
    folder: Path, name: str, rows: Sequence[Mapping[str, Any]], notes: str | None
) -> str:
    """Return the page of a study, whose rows are known."""
    from dg_lightning.report.study_part import study_part

    return _page(name, study_part(folder, name, rows, notes))


def _number(value: str) -> Any:
    """Return a cell of results.csv as what it was."""
    if value == "":
        return None
    try:
        return float(value) if any(mark in value for mark in ".en") else int(value)
    except ValueError:
        return value


def _page(title: str, content: str) -> str:
    here = files("dg_lightning.report")
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    script = here.joinpath("script.js").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{text(title)} - dg-lightning</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#content">To the content</a>
<header><h1>{text(title)}</h1></header>
<main id="content">
{content}
</main>
<footer><p>Charts: hover, or press Tab and then the arrow keys. By dg-lightning.</p></footer>
<div id="tip" role="status" aria-live="polite" hidden></div>
<script>
{script}</script>
</body>
</html>
"""
