"""The house rules of ARCHITECTURE.md, read off the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the bottom to the top: a room may import rooms of its own line and of lines before it.
LEVELS = [
    {"gates"},
    {"layers", "compute", "schedules"},
    {"budget", "collapse", "rewiring"},
    {"surgery", "continual", "training", "monitoring", "runtime"},
    {"callbacks", "datamodules"},
    {"study", "checking"},
    {"cli"},
]
LEVEL = {room: index for index, rooms in enumerate(LEVELS) for room in rooms}


def sources() -> Iterator[Path]:
    for folder in ("dg_lightning", "callbacks", "datamodules", "configs"):
        yield from sorted((ROOT / folder).rglob("*.py"))  # does not follow links


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "dg_lightning" else parts[0]


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("dg_lightning.")}
    return found & LEVEL.keys()


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_downwards(path: Path) -> None:
    own = LEVEL.get(room_of(path))
    if own is not None:
        assert all(LEVEL[room] <= own for room in imported_rooms(path))


def test_rooms_of_one_level_import_each_other_one_way_only() -> None:
    pairs = {
        (room_of(path), other)
        for path in sources()
        if room_of(path) in LEVEL
        for other in imported_rooms(path)
        if other != room_of(path)
    }
    assert not [(one, other) for one, other in pairs if (other, one) in pairs]


# Of torch and Lightning, overridden or set here.
OVERRIDDEN = {"_apply", "_batches_that_stepped", "_iterator", "_parse_ckpt_path"}


def private_names() -> set[tuple[str, str]]:
    """Return files and the private names of other packages that they use."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    ours = {"_asdict"}  # public, of a NamedTuple
    for _, node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    ours -= OVERRIDDEN
    found = set()
    for path, node in nodes:
        names: list[object] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = node.func.id in ("getattr", "hasattr", "setattr") and len(node.args) > 1
            second = node.args[1] if named else None
            names = [second.value] if isinstance(second, ast.Constant) else []
        for name in names:
            if re.match(r"_[a-z]", str(name)) and name not in ours:
                found.add((path.relative_to(ROOT).as_posix(), str(name)))
    return found


def test_every_private_api_is_listed_with_its_test() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:5] for line in text.splitlines() if line.startswith("| `")]
    listed = set()
    for file, names, _, test in rows:
        assert (ROOT / "tests" / test.strip(" `")).is_file()
        listed |= {(file.strip(" `"), name) for name in re.findall(r"`(\w+)`", names)}
    assert listed == private_names()


def test_the_page_names_every_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for path in sources():
        if not path.name.startswith("__"):
            assert re.search(rf"\b{re.escape(path.stem)}\b", text), path
