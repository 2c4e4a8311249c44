"""Pages of the site that stand at the top of the repository: results and changelog."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"RESULTS.md": "results.md", "CHANGELOG.md": "changelog.md"}
LINKS = {"](docs/": "](", "](../RESULTS.md": "](results.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with links as they are within the site, not in the repository."""
    for old, new in LINKS.items():
        markdown = markdown.replace(old, new)
    return markdown
