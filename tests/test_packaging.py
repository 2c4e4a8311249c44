import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from filelock import FileLock
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# A project that needs torch, built without anything else.
BACKEND = """
import zipfile

EXTRAS = "dev vision audio cells tables plot study wandb export models".split()
METADATA = [
    "Metadata-Version: 2.1", "Name: app", "Version: 1",
    "Requires-Dist: torch>=2.10", "Requires-Dist: torchvision>=0.25",
    *(f"Provides-Extra: {extra}" for extra in EXTRAS),
]

def build_wheel(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/app-1-py3-none-any.whl", "w") as file:
        file.writestr("app.py", "")
        file.writestr("app-1.dist-info/METADATA", "\\n".join(METADATA) + "\\n")
        file.writestr("app-1.dist-info/WHEEL", WHEEL)
        file.writestr("app-1.dist-info/RECORD", "")
    return "app-1-py3-none-any.whl"

build_editable = build_wheel
"""


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


def test_every_requirement_names_the_oldest_version_that_make_lowest_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}
    for requirement in map(Requirement, chain(project["dependencies"], *extras.values())):
        if requirement.name != project["name"]:
            assert [bound.operator for bound in requirement.specifier] == [">="], requirement


def test_no_index_is_named_but_the_one_of_pytorch_for_cpus() -> None:
    for path in (*ROOT.glob("*constraints*"), ROOT / "pyproject.toml", ROOT / "Makefile"):
        text = path.read_text().replace(CPU_INDEX, "")
        assert "://" not in text, path
        if path.name != "Makefile":
            assert "index-url" not in text, path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # First the source archive, then the wheel from it: what is missing there is missing for users.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    with FileLock(tmp_path_factory.getbasetemp().parent / "build.lock"):  # shared by all workers
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


def put_wheel(index: Path, name: str, version: str, *needs: str) -> None:
    """Put a wheel without content into a package index (PEP 503)."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        info = f"{name}-{version}.dist-info"
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        lines = [f"Requires-Dist: {need}\n" for need in needs]
        file.writestr(f"{info}/METADATA", head + "".join(lines))
        file.writestr(f"{info}/WHEEL", WHEEL)
        file.writestr(f"{info}/RECORD", "")
    names = sorted(path.name for path in folder.glob("*.whl"))
    links = (f'<a href="{n.replace("+", "%2B")}">{n}</a>' for n in names)
    (folder / "index.html").write_text("\n".join(links))


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return stand-ins of PyPI, whose torch needs CUDA, and of PyTorch's index for CPUs."""
    pypi, cpu = (tmp_path_factory.mktemp(name) for name in ("pypi", "cpu"))
    for torch, vision in (("2.10.0", "0.25.0"), ("2.11.0", "0.26.0")):
        put_wheel(pypi, "torch", torch, "nvidia-cudnn-cu12")
        put_wheel(pypi, "torchvision", vision, f"torch=={torch}")
        put_wheel(pypi, "torchaudio", torch)
        put_wheel(cpu, "torch", f"{torch}+cpu")
        put_wheel(cpu, "torchvision", f"{vision}+cpu", f"torch=={torch}")
        put_wheel(cpu, "torchaudio", f"{torch}+cpu")
    put_wheel(pypi, "nvidia_cudnn_cu12", "9.0")
    put_wheel(pypi, "app", "1", "torch>=2.10", "torchvision>=0.25")
    return pypi, cpu


@pytest.fixture
def only_pypi(indexes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see the stand-in of PyPI alone."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "MAKE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("PIP_INDEX_URL", indexes[0].as_uri())


def installed(python: Path) -> dict[str, str]:
    """Return the packages of an environment, with their versions."""
    frozen = checked(
        sys.executable, "-m", "pip", "--python", python, "list", "--format=freeze", cwd=ROOT
    )
    found = dict(line.split("==") for line in frozen.split())
    return {name: version for name, version in found.items() if name.startswith(("torch", "nvid"))}


@pytest.mark.slow
@pytest.mark.usefixtures("only_pypi")
@pytest.mark.parametrize(
    ("torch", "vision"),
    [("2.10.0+cpu", "0.25.0+cpu"), ("2.11.0+cpu", "0.26.0+cpu"), ("2.11.0+cpu", None)],
)
def test_constraints_keep_a_torch_for_cpus_that_is_installed(
    torch: str, vision: str | None, indexes: tuple[Path, Path], tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    venv.create(tmp_path, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    first = [f"torch=={torch}", *([f"torchvision=={vision}"] if vision else [])]
    checked(*pip, "--index-url", indexes[1].as_uri(), *first, cwd=tmp_path)
    checked(*pip, "-c", ROOT / "constraints.txt", "app", cwd=tmp_path)
    found = installed(python)
    assert found["torch"] == torch
    assert not [name for name in found if name.startswith("nvidia")]


def project_of_its_own(folder: Path, cpu: Path) -> None:
    """Write a small project with our Makefile, whose index for CPUs is on this machine."""
    for path in ROOT.glob("*constraints*"):
        shutil.copy(path, folder)
    makefile = (ROOT / "Makefile").read_text()
    (folder / "Makefile").write_text(makefile.replace(CPU_INDEX, cpu.as_uri()))
    (folder / "backend.py").write_text(f"WHEEL = {WHEEL!r}\n{BACKEND}")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "app"\ndynamic = ["version", "dependencies", "optional-dependencies"]\n'
    )
    (folder / "examples").mkdir()
    (folder / "examples" / "demo.py").write_text("print('the demo has run')\n")


@pytest.mark.slow
@pytest.mark.usefixtures("only_pypi")
@pytest.mark.parametrize(
    ("options", "torch", "vision"),
    [([], "2.10.0", "0.25.0"), (["TORCH=cpu"], "2.10.0+cpu", "0.25.0+cpu")],
    ids=["default", "cpu"],
)
def test_make_demo_installs_the_tested_versions_for_cpus_if_asked_to(
    options: list[str], torch: str, vision: str, indexes: tuple[Path, Path], tmp_path: Path
) -> None:
    project_of_its_own(tmp_path, indexes[1])
    said = checked("make", f"PYTHON={sys.executable}", "demo", *options, cwd=tmp_path)
    assert "the demo has run" in said
    found = installed(tmp_path / ".venv" / "bin" / "python")
    assert (found["torch"], found["torchvision"]) == (torch, vision)
    assert any(name.startswith("nvidia") for name in found) == (not options)


@pytest.mark.slow
@pytest.mark.usefixtures("only_pypi")
def test_make_demo_for_cpus_is_not_answered_by_an_earlier_installation(
    indexes: tuple[Path, Path], tmp_path: Path
) -> None:
    project_of_its_own(tmp_path, indexes[1])
    checked("make", f"PYTHON={sys.executable}", "demo", cwd=tmp_path)
    checked("make", f"PYTHON={sys.executable}", "demo", "TORCH=cpu", cwd=tmp_path)
    found = installed(tmp_path / ".venv" / "bin" / "python")
    assert found["torch"] == "2.10.0+cpu"


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "kernels"])
def test_every_installation_of_make_can_be_for_cpus(target: str) -> None:
    asked = checked("make", "--dry-run", "--always-make", target, "TORCH=cpu", cwd=ROOT)
    installs = [line for line in asked.splitlines() if " install " in line]
    assert installs
    assert all(CPU_INDEX in line for line in installs)
    plain = checked("make", "--dry-run", "--always-make", target, cwd=ROOT)
    assert CPU_INDEX not in plain


def test_the_readme_has_one_line_that_installs_the_tested_versions_for_cpus() -> None:
    readme = (ROOT / "README.md").read_text()
    (line,) = [
        line for line in readme.splitlines() if line.startswith("pip ") and CPU_INDEX in line
    ]
    assert re.search(r"(-c|--constraint) ?constraints\S*\.txt", line)
    assert "make demo TORCH=cpu" in readme
    assert "make test TORCH=cpu" in readme
