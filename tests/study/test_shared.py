"""Opening a database that several workers share."""

from pathlib import Path
from typing import Any

import pytest
from optuna.storages import RDBStorage
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

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
    with pytest.raises(ValueError, match="`storage` must be the URL of a database"):
        SharedStudy("postgresql+psycopg://nobody@nowhere/x", "x", tmp_path)
    assert len(tried) == 1
