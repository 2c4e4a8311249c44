"""The report page: one HTML file with its style, script and data, without network access."""

from importlib.resources import files
from pathlib import Path

from dg_lightning.files import write_text
from dg_lightning.monitoring.report.html import text
from dg_lightning.monitoring.report.run import is_run, read_run
from dg_lightning.monitoring.report.run_part import run_part

__all__ = ["page", "run_page", "write_page"]

# Makes the browser block everything that is not in this file.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def run_page(folder: Path) -> str:
    """Return the page of a run, or of the newest run in a folder of runs."""
    run = folder if is_run(folder) else _newest_run(folder)
    return page(str(run), run_part(read_run(run)))


def write_page(folder: Path, content: str, output: Path | None = None) -> Path:
    """Write a page to `output`, by default `report.html` in the folder, and return its path."""
    path = folder / "report.html" if output is None else output
    if path.suffix != ".html" and path.exists():
        raise ValueError(f"{str(path)!r} exists and is not a report: name a file *.html.")
    if path.is_dir():
        raise ValueError(f"`output` must be a file, got the folder {str(path)!r}: add report.html.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, content)
    return path


def _newest_run(folder: Path) -> Path:
    """Return the newest training run in a folder of runs."""
    runs = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    trained = [path for path in runs if (path / "checkpoints").is_dir()] or runs
    if not trained:
        raise ValueError(
            f"{str(folder)!r} holds neither a study (results.csv with a column variant) nor a run "
            "(metrics.csv, gates/ or config.yaml): give the folder that `study` or `fit` has named."
        )
    # Not of the folder itself, which every report modifies.
    return max(trained, key=lambda path: max(p.stat().st_mtime for p in _output_paths(path)))


def _output_paths(run: Path) -> list[Path]:
    names = ("checkpoints", "config.yaml", "metrics.csv", "gates")
    return [path for name in names if (path := run / name).exists()]


def page(title: str, content: str) -> str:
    """Return a whole page around some content, with style and script."""
    here = files("dg_lightning.monitoring.report")
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
<a class="skip" href="#content">Skip to content</a>
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
