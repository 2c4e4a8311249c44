"""One folder rule for all loggers, and the newest run of a config."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from dg_lightning.cli import main
from dg_lightning.cli.runs import claim_run_folder, newest_checkpoint, with_csv_logger_first

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SMALL = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]
LOGGERS = {
    "csv": [],
    "tensorboard": ["--config=logger/tensorboard"],
    "wandb": ["--config=logger/wandb"],
    "two": ["--config=two.yaml"],
    "none": ["--trainer.logger=false"],
    "lightning's": ["--trainer.logger=true"],
}
TWO = """
trainer:
  logger:
    - {class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: boards}}
    - {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: mine, name: x}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("logger", LOGGERS)
def test_every_command_uses_the_newest_run_of_its_config(
    logger: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    if logger == "wandb":
        pytest.importorskip("wandb")
    Path("two.yaml").write_text(TWO)
    options = [*SMALL, *LOGGERS[logger]]
    main(["fit", "--config=digits/dynamicgate", "--model.net.hidden=[7]", *options])
    main(["fit", "--config=digits/baseline", "--model.net.hidden=[9]", *options])
    for config, width in (("digits/dynamicgate", 7), ("digits/baseline", 9)):
        used = []
        for command in ("validate", "test", "predict") if logger == "csv" else ("validate",):
            caplog.clear()
            main([command, f"--config={config}", *options])
            (line,) = [m for m in caplog.messages if m.startswith("Using the newest checkpoint, ")]
            used.append(line)
        capsys.readouterr()
        if logger == "csv":
            main(["export", f"--config={config}", f"--output={width}", "--batch_sizes=[1]"])
            main(["report", f"--config={config}", f"--output={width}.html"])
            out = capsys.readouterr().out
            used += [x for x in out.splitlines() if x.startswith("Using the newest checkpoint, ")]
            assert Path(f"{width}.html").exists()
            assert len(used) == 5
        assert len(set(used)) == 1
        run = Path(used[0].removeprefix("Using the newest checkpoint, ")).parents[1]
        saved = yaml.safe_load((run / "config.yaml").read_text())
        assert saved["model"]["init_args"]["net"]["init_args"]["hidden"] == [width]
        assert (run / "run.json").exists()
        if logger in ("csv", "tensorboard", "wandb"):
            assert run == Path("runs", config, "version_0")


@pytest.mark.slow
def test_a_run_is_named_by_its_folder_or_its_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["fit", "--config=digits/baseline", "--model.net.hidden=[7]", *SMALL])
    main(["fit", "--config=digits/baseline", *SMALL])  # the newest one is not meant
    run = Path("runs/digits/baseline/version_0")
    for name in (run, run / "checkpoints" / "last.ckpt"):
        for command in ("validate", "test", "predict"):
            main([command, str(name), *SMALL])
        main(["export", str(name), "--output=net", "--batch_sizes=[1]"])
        main(["report", str(name), "--output=report.html"])
    tested = yaml.safe_load(Path("runs/digits/baseline/version_3/config.yaml").read_text())
    assert tested["ckpt_path"] == str(run / "checkpoints" / "last.ckpt")
    assert tested["model"]["init_args"]["net"]["init_args"]["hidden"] == [7]
    main(["test", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", *SMALL])
    capsys.readouterr()
    Path("alone").mkdir()
    Path("alone/last.ckpt").write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    evil = yaml.safe_load((run / "config.yaml").read_text())
    evil["trainer"]["callbacks"] = [{"class_path": "evil.Callback"}]
    (run / "config.yaml").write_text(yaml.safe_dump(evil))
    for folder, message in (("alone", "config.yaml"), (str(run), "'evil.Callback'")):
        with pytest.raises(SystemExit) as stopped:
            main(["test", folder])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_configs_that_share_a_folder_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    for name, width in (("a", 7), ("b", 9)):
        content = yaml.safe_load(
            (Path(__file__).parents[2] / "configs" / "digits" / "baseline.yaml").read_text()
        )
        content["model"]["init_args"]["net"]["init_args"]["hidden"] = [width]
        content["trainer"]["logger"]["init_args"]["name"] = "mine"
        Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
        main(["fit", f"--config={name}.yaml", *SMALL])
    main(["test", "--config=a.yaml", *SMALL])
    assert "runs/mine/version_0/checkpoints/last.ckpt" in caplog.text
    record = json.loads(Path("runs/mine/version_0/run.json").read_text())
    assert record == {"command": "fit", "configs": [str(Path("a.yaml").resolve())]}


def checkpoint(path: str, age: int, configs: list[str] | None = None) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True)
    file.touch()
    os.utime(file, (1e9 - age, 1e9 - age))
    if configs is not None:
        (file.parents[1] / "run.json").write_text(json.dumps({"configs": configs}))


def test_the_newest_of_the_config_or_of_those_that_do_not_say() -> None:
    trainer: dict[str, Any] = {"default_root_dir": "runs", "logger": None}
    checkpoint("runs/lightning_logs/version_0/checkpoints/a.ckpt", 30, ["digits/baseline"])
    checkpoint("runs/lightning_logs/version_1/checkpoints/b.ckpt", 20)
    checkpoint("runs/lightning_logs/version_2/checkpoints/c.ckpt", 10, ["digits/rigl"])
    config = str(Path(__file__).parents[2] / "configs" / "digits" / "baseline.yaml")
    assert newest_checkpoint(trainer, [config]).endswith("a.ckpt")
    Path("runs/lightning_logs/version_0/run.json").write_text("damaged")
    assert newest_checkpoint(trainer, [config]).endswith("b.ckpt")
    with pytest.raises(SystemExit):
        newest_checkpoint({**trainer, "default_root_dir": "elsewhere"}, [config])


def test_a_csv_logger_comes_first_where_loggers_are_named() -> None:
    wandb = {"class_path": "lightning.pytorch.loggers.WandbLogger"}
    csv = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    root = "runs/x"
    for logger in (None, True, False, csv, [csv, wandb]):
        assert with_csv_logger_first({"logger": logger, "default_root_dir": root}) is None
    assert with_csv_logger_first({"logger": [wandb, csv]}) == [csv, wandb]
    first, second = with_csv_logger_first({"logger": wandb, "default_root_dir": root}) or [{}, {}]
    assert first["init_args"] == {"save_dir": root, "name": ""}
    assert second == wandb


def test_stacked_configs_are_told_apart_and_a_newer_last_one_is_taken() -> None:
    trainer: dict[str, Any] = {"default_root_dir": "runs", "logger": None}
    here = [str(Path(name).resolve()) for name in ("base", "a", "b")]
    checkpoint("runs/lightning_logs/version_0/checkpoints/last.ckpt", 30, [here[0], here[1]])
    checkpoint("runs/lightning_logs/version_1/checkpoints/last.ckpt", 20, [here[0], here[2]])
    assert "version_0" in newest_checkpoint(trainer, [here[0], here[1]])
    assert "version_1" in newest_checkpoint(trainer, [here[0], here[2]])
    assert "version_1" in newest_checkpoint(trainer, [here[0]])
    newer = Path("runs/lightning_logs/version_1/checkpoints/last-v1.ckpt")
    newer.touch()
    assert newest_checkpoint(trainer, [here[0]]) == str(newer)


def test_a_version_that_is_taken_is_not_written_over() -> None:
    options = ["--config=digits/baseline", *SMALL, "--trainer.logger.version=mine"]
    main(["fit", *options])
    metrics = Path("runs/digits/baseline/mine/metrics.csv").read_bytes()
    main(["test", *options])
    main(["predict", *options])
    assert Path("runs/digits/baseline/mine/metrics.csv").read_bytes() == metrics
    assert Path("runs/digits/baseline/mine_1/confusion.csv").exists()
    assert Path("runs/digits/baseline/mine_2/predictions.csv").exists()


def test_runs_that_start_at_once_have_a_folder_each() -> None:
    trainers = [
        pl.Trainer(logger=CSVLogger("runs", name="x"), accelerator="cpu", max_epochs=1)
        for _ in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(claim_run_folder, trainers))
    assert {path.name for path in Path("runs/x").iterdir()} == {f"version_{i}" for i in range(4)}
    claim_run_folder(pl.Trainer(logger=CSVLogger("dev"), fast_dev_run=True, accelerator="cpu"))
    claim_run_folder(pl.Trainer(logger=False, accelerator="cpu"))
    assert not Path("dev").exists()


@pytest.mark.slow
def test_a_command_leaves_no_folder_that_it_has_made_and_not_used() -> None:
    Path("runs/kept").mkdir(parents=True)
    script = """
        import lightning.pytorch as pl
        from lightning.pytorch.loggers import CSVLogger
        from dg_lightning.cli.runs import claim_run_folder
        for version in ("unused", "used", "kept"):
            logger = CSVLogger("runs", name="", version=version)
            claim_run_folder(pl.Trainer(logger=logger, accelerator="cpu"))
        open("runs/used/metrics.csv", "w").close()
        print(sorted(path.name for path in __import__("pathlib").Path("runs").iterdir()))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kept', 'unused', 'used']"
    assert {path.name for path in Path("runs").iterdir()} == {"kept", "used"}


@pytest.mark.slow
def test_two_programs_at_once_lose_nothing() -> None:
    command = [sys.executable, "-m", "dg_lightning", "fit", "--config=digits/baseline", *SMALL]
    started = [
        subprocess.Popen([*command, f"--seed_everything={seed}"], stderr=subprocess.DEVNULL)
        for seed in (1, 2)
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    configs = [yaml.safe_load(p.read_text()) for p in Path("runs").rglob("version_*/config.yaml")]
    assert {config["seed_everything"] for config in configs} == {1, 2}
    assert len(list(Path("runs").rglob("last.ckpt"))) == 2


HOLD_FILE = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
# Claims a folder, and stays in the middle of it.
HOLD_CLAIM = """
import sys
import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from dg_lightning.cli.runs import claim_run_folder

class Slow(CSVLogger):
    @property
    def version(self):
        print("held", flush=True)
        sys.stdin.read()
        return super().version

claim_run_folder(pl.Trainer(logger=Slow("runs", name="digits/baseline"), accelerator="cpu"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("held", ["in the temporary folder", "in the run folder"])
def test_a_lock_of_another_process_does_not_hang_a_run(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    script, argument = HOLD_CLAIM, ""
    if held == "in the temporary folder":  # anybody can compute its name of version 0.2
        folder = f"{os.getuid()} {Path('runs/digits/baseline').resolve()}"
        digest = hashlib.sha256(folder.encode()).hexdigest()[:16]
        script, argument = HOLD_FILE, str(temporary / f"dg-lightning-{digest}.lock")
    fit = [sys.executable, "-m", "dg_lightning", "fit", "--config=digits/baseline", *SMALL]
    with subprocess.Popen(
        [sys.executable, "-c", script, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            done = subprocess.run(fit, capture_output=True, text=True, check=False, timeout=150)
        finally:
            holder.communicate()
    if held == "in the temporary folder":
        assert done.returncode == 0, done.stderr
    else:  # a program that needs no lock may go on
        assert done.returncode in (0, 2), done.stderr
        assert done.returncode == 0 or str(Path("runs/digits/baseline")) in done.stderr
        assert "Traceback" not in done.stderr


def test_claimed_folders_leave_no_locks_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    claim_run_folder(pl.Trainer(logger=CSVLogger("runs", name="x"), accelerator="cpu"))
    assert list(temporary.iterdir()) == []
    assert [path.name for path in Path("runs").rglob("*")] == ["x", "version_0"]
