import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def checked(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_package_folder_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"dg_lightning.callbacks": "callbacks", "dg_lightning.datamodules": "datamodules"}
    found = {"dg_lightning.configs"}
    for path in (ROOT / "dg_lightning").rglob("__init__.py"):
        found.add(".".join(path.parent.relative_to(ROOT).parts))
    for package, folder in folders.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *path.parent.relative_to(ROOT / folder).parts]))
    assert set(project["packages"]) == found


def test_every_requirement_names_the_oldest_version_that_make_lowest_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}
    for requirement in map(Requirement, chain(project["dependencies"], *extras.values())):
        if requirement.name != project["name"]:
            assert [bound.operator for bound in requirement.specifier] == [">="], requirement


def test_constraints_and_metadata_name_no_index() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile"):
        text = (ROOT / name).read_text()
        assert "://" not in text, name
        assert "index-url" not in text, name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # First the source archive, then the wheel from it: what is missing there is missing for users.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    checked(*build, ROOT, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_one_top_level_package_with_every_file(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dg_lightning"}
    inside = {
        f"dg_lightning/{path.relative_to(ROOT / 'dg_lightning')}"
        for path in (ROOT / "dg_lightning").rglob("*")
        if path.suffix in (".py", ".yaml", ".css", ".js")
    }
    for folder in ("callbacks", "datamodules", "configs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml"):
                inside.add(f"dg_lightning/{path.relative_to(ROOT)}")
    assert inside | {"dg_lightning/py.typed"} == {n for n in names if n.startswith("dg_lightning/")}


@pytest.mark.slow
def test_the_wheel_runs_from_another_folder_beside_a_users_own_callbacks(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    # Dependencies are lent by path, which leaves out our own editable install of this checkout.
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    checked(
        *[sys.executable, "-m", "pip", "--python", python, "install"],
        *["--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel],
        cwd=tmp_path,
    )

    project = tmp_path / "project"
    for package in ("callbacks", "datamodules", "configs"):
        (project / package).mkdir(parents=True)
    (project / "callbacks" / "__init__.py").write_text(
        "from lightning.pytorch import Callback\n\n\n"
        "class Mine(Callback):\n"
        "    def on_fit_end(self, trainer, pl_module):\n"
        "        open('mine.txt', 'w').write(str(trainer.global_step))\n"
    )
    where = checked(
        *[
            python,
            "-c",
            "import callbacks as own, dg_lightning.callbacks as c; own.Mine; print(c.__file__)",
        ],
        cwd=project,
    )
    assert str(site) in where
    command = [environment / "bin" / "dg-lightning", "fit", "--config", "digits/dynamicgate"]
    checked(
        *[*command, "--trainer.max_epochs=1", "--trainer.callbacks+=callbacks.Mine"],
        cwd=project,
        PYTHONPATH=str(project),
    )
    assert (project / "mine.txt").read_text() == "21"
    assert list((project / "runs").rglob("last.ckpt"))
