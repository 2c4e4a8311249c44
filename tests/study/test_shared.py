"""Opening a database that several workers share."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import RDBStorage
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from dg_lightning.cli import main
from dg_lightning.study import shared
from dg_lightning.study.shared import SharedStudy, sqlite_url


@pytest.mark.parametrize("kind", [IntegrityError, ProgrammingError])
@pytest.mark.parametrize("failures", [1, 4])
def test_tables_that_another_worker_has_just_made_are_no_error(
    kind: Any, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen with three workers on an empty PostgreSQL database: 'duplicate key', 'exists'."""
    tried = []
    real = RDBStorage

    def racing(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        if len(tried) <= failures:
            raise kind("CREATE TYPE", None, Exception("duplicate key"))
        return real(*args, **kwargs)

    monkeypatch.setattr(shared, "RDBStorage", racing)
    monkeypatch.setattr("time.sleep", lambda _: None)
    study = SharedStudy(sqlite_url(tmp_path), "x", tmp_path / "workers")
    assert len(tried) == failures + 1
    assert study.study.study_name == "x"


def test_a_database_that_cannot_be_reached_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        raise OperationalError("connect", None, Exception("refused"))

    monkeypatch.setattr(shared, "RDBStorage", unreachable)
    with pytest.raises(ValueError, match="`storage` must be the URL"):
        SharedStudy("postgresql+psycopg://nobody@nowhere/x", "x", tmp_path)
    assert len(tried) == 1


@pytest.mark.parametrize("command", ["study", "search"])
@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:s3cret@127.0.0.1:9/x",  # without its driver
        "postgresql+psycopg://me:a@s3cret@127.0.0.1:9/x",
        "postgresql://me:s3cret@127.0.0.1:9/x",
        "postgresql://me@127.0.0.1:9/x?password=s3cret",
        "mysql+pymysql://me@127.0.0.1:9/x?passwd=s3cret&ssl_key_password=s3cret",
        "postgresql://me:s3cret@127.0.0.1:port/x",  # no URL
        "postgresql//me:s3cret@127.0.0.1/x",
        "postgresql://me:what?s3cret@127.0.0.1:9/x",
        "postgresql://me:what/s3cret@127.0.0.1:9/x",
        "postgresql://s3cret@127.0.0.1:9/x",
        "nothing+known://me:s3cret@127.0.0.1/x",
        "sqlite:///nowhere/s3cret@x/study.db?password=s3cret",
    ],
)
def test_a_password_in_the_url_of_a_database_is_never_shown(
    url: str,
    command: str,
    in_empty_folder: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DG_TRACEBACK", "1")
    options = ["--config=studies/digits"]
    if command == "search":
        Path("search.yaml").write_text(
            "{base: digits/dynamicgate, baseline: digits/baseline, "
            "parameters: [{name: model.gate_lr_factor, low: 1.0, high: 2.0}]}"
        )
        options = ["--config=search.yaml"]
    with pytest.raises(SystemExit) as stopped:
        main([command, *options, "--output=out", f"--storage={url}"])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    (line,) = [x for x in said.err.splitlines() if x.startswith("dg-lightning: error: ")]
    assert "`storage`" in line
    if not url.startswith("sqlite"):
        assert "s3cret" not in said.out + said.err
    else:
        assert "password=s3cret" not in said.out + said.err
    for path in Path("out").rglob("*"):
        assert path.is_dir() or b"password=s3cret" not in path.read_bytes()


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_lock_that_is_never_released_is_told(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    lock = tmp_path / "workers" / "create.lock"
    opening = """
        import sys
        from pathlib import Path
        from dg_lightning.study import shared
        shared._SQLITE_WAIT = 3
        folder = Path(sys.argv[1])
        shared.SharedStudy(shared.sqlite_url(folder), "x", folder / "workers")
    """
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(opening), str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        holder.communicate()
    assert done.returncode != 0
    assert str(lock) in done.stderr
