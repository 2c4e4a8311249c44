"""Pages of the site that stand at the top of the repository: results and changelog."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"RESULTS.md": "results.md", "CHANGELOG.md": "changelog.md"}
LINKS = {"](docs/": "]("}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, with links as they are within the site."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        for old, new in LINKS.items():
            text = text.replace(old, new)
        files.append(File.generated(config, target, content=text))
    return files
