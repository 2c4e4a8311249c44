"""A full disk loses nothing: files are written beside their target and renamed."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dg_lightning.files import atomic_write, write_text

# No file of this process may become larger than so many bytes: as on a full disk, writing fails.
LIMITED = """
import resource, sys
from dg_lightning.cli import main
import torch, lightning.pytorch, dg_lightning.cli.commands
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
main(sys.argv[2:])
"""


def limited(size: int, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(size), *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=300,
    )


FIT = [
    *["fit", "--config=digits/baseline", "--trainer.limit_train_batches=2"],
    *["--trainer.enable_progress_bar=false", "--trainer.callbacks.dirpath=kept"],
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dg_lightning.cli import main

    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["dg-lightning"])
        main([*FIT, "--trainer.max_epochs=1"])
    return folder


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_leaves_the_old_one(trained: Path) -> None:
    good = (trained / "kept" / "last.ckpt").read_bytes()
    args = [*FIT, "--trainer.max_epochs=2", "--ckpt_path=kept/last.ckpt"]
    done = limited(len(good) // 2, *args, cwd=trained)
    assert done.returncode == 2, done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("dg-lightning: error: ")]
    assert "File too large" in line
    assert "Traceback" not in done.stderr
    assert (trained / "kept" / "last.ckpt").read_bytes() == good
    assert [path.name for path in (trained / "kept").iterdir()] == ["last.ckpt"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_an_export_that_does_not_fit_leaves_the_old_one(
    format: str, trained: Path, tmp_path: Path
) -> None:
    old = tmp_path / f"net.{format}"
    old.write_text("old")
    args = ["export", f"--ckpt_path={trained}/kept/last.ckpt", f"--format={format}"]
    done = limited(20_000, *args, f"--output={old}", "--batch_sizes=[1]", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("dg-lightning: error: ")]
    assert "cannot be written" in line
    assert "Traceback" not in done.stderr
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [old.name]


def test_a_failed_write_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    write_text(target, "old")

    def interrupted() -> None:
        with atomic_write(target) as unfinished:
            unfinished.write_text("half")
            assert target.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"]
    assert target.read_text() == "old"
    write_text(target, "new")
    assert target.read_text() == "new"


def test_many_writers_and_links(tmp_path: Path) -> None:
    target, link = tmp_path / "a.txt", tmp_path / "link.txt"
    write_text(target, "old")
    link.symlink_to(target)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: write_text(link, str(i)), range(200)))
    assert link.is_symlink()
    assert target.read_text() in {str(i) for i in range(200)}
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "link.txt"}
