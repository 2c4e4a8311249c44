"""What the program answers by itself: at once, without importing torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dg_lightning
from dg_lightning.cli import main, shipped_configs, start
from dg_lightning.cli.start import COMMANDS

# Runs the program, and then says which heavy packages it has imported.
PROBE = """
import sys
from dg_lightning.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stopped:
    print("status", stopped.code)
heavy = {"torch", "lightning", "jsonargparse", "numpy", "pandas", "sklearn"} & set(sys.modules)
print("imported", *sorted(heavy))
"""


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (["--version"], f"dg-lightning {dg_lightning.__version__}"),
        ([], "usage: dg-lightning COMMAND"),
        (["--help"], "usage: dg-lightning COMMAND"),
        (["--quiet", "--version"], f"dg-lightning {dg_lightning.__version__}"),
        (["configs"], "digits/dynamicgate"),
        (["fitt"], "Unknown command 'fitt'; did you mean fit?"),
        (["trane"], "Unknown command 'trane'; did you mean fit?"),
        (["fit", "--config=digits/baseline", "--trainr.max_epochs=1"], "did you mean --trainer?"),
        (["test", "--config=digits/baseline", "--nosuch", "3"], "Unknown option --nosuch; "),
        (["report"], "Name one run: pass its folder, "),
        (["xyz"], f"Unknown command 'xyz'; choose from {', '.join(COMMANDS)}."),
        (["--config=a"], "Unknown command '--config=a'"),
        (["fit", "--config", "nowhere.yaml"], "There is no config 'nowhere.yaml'"),
        (["fit", "-c=digits/dynamcgate"], "did you mean digits/dynamicgate?"),
        (["fit", "--config", "digits/nosuch"], "digits has baseline, "),
        (["fit"], "`fit` needs a config, such as `dg-lightning fit --config digits/dynamicgate`"),
        (["check"], "`check` needs a config"),
        (["study", "--config=studies/digit"], "did you mean studies/digits?"),
        (["test", "--config=digits/baseline", "--ckpt_path=a.ckpt"], "'a.ckpt'"),
        (["export", "--ckpt_path", "a.ckpt"], "No checkpoint found at 'a.ckpt'"),
        (["fit", "--data.path", "a.h5ad"], "No file or folder at 'a.h5ad'"),
        (["report", "nowhere"], "No run found at 'nowhere'"),
        (["features", "nowhere"], "No run found at 'nowhere'"),
        (["configs", "nothing"], "No config begins with 'nothing'"),
        (["configs", "a", "b"], "`configs` takes at most one name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_simple_questions_are_answered_without_torch(
    args: list[str], answer: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *args],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(dg_lightning.__file__).parents[1])},
    )
    assert answer in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].strip() == "imported"
    refused = "dg-lightning: error: " in done.stderr
    assert ("status 2" in done.stdout) == refused
    assert len(done.stderr.splitlines()) == refused


def test_the_usage_lists_every_command_and_each_has_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([])
    usage = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in usage
        if command == "configs":
            continue
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        assert "--" in shown
        if command in start._TRAINING:
            roots = {f"--{name}" for name in re.findall(r"(?<=[ \[]--)\w+", shown)}
            assert roots - {"--help"} <= set(start._OPTIONS)


def test_every_config_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped_configs()
    assert all(len(line.split(maxsplit=1)[1]) > 10 for line in lines)
    main(["configs", "digits/"])
    assert all(line.startswith("digits/") for line in capsys.readouterr().out.splitlines())


def test_an_interruption_while_importing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "dg_lightning.cli.commands":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dg_lightning.cli.commands", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        main(["export", "--output=net"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "dg-lightning: interrupted.\n"


def test_the_face_of_the_package_is_complete() -> None:
    for name in dg_lightning.__all__:
        assert getattr(dg_lightning, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = dg_lightning.Nothing
