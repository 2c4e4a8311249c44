import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dg_lightning.cli import main

pytestmark = pytest.mark.usefixtures("in_empty_folder")

RunProgram = Callable[..., subprocess.CompletedProcess[str]]
SMALL = [
    "--trainer.max_epochs=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]

PENALTY = ["--trainer.callbacks+=GatePenalty", "--trainer.callbacks.weight=1"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail; return its one line."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("dg-lightning: error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert not any("Traceback" in line for line in lines)
    return errors[0].removeprefix("dg-lightning: error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.net.hiden=[3]"], "'hiden' is not accepted; did you mean hidden?"),
        (["--trainer.max_epoch=3"], "--trainer.max_epoch=3; did you mean --trainer.max_epochs?"),
        (["--model.capture=true"], "'capture' is not accepted; it is now cuda_graphs."),
        (["--zebra=3"], "Unknown option --zebra; "),
        (["mnist/dynamicgate"], "mnist/dynamicgate; pass a config with --config"),
        (["--trainer.max_epochs=many"], "trainer.max_epochs: expected int."),
        (["--model.net.gate.rank=x"], "gate: expected int, got x."),
        (["--model.net.gate.thresold=0.3"], "gate: Unexpected keys: {'thresold'}."),
        (["--model.net.gate.threshold=1.5"], "`threshold` must be in [0, 1), got 1.5."),
        (["--config=typo.yaml"], "did you mean trainer.max_epochs?"),
        (["--data=DigitsDatModule"], "No class DigitsDatModule found; did you mean Digits"),
        (["--trainer.callbacks+=RigLL"], "did you mean RigL?"),
        (["--model=no_package.Model"], "model: No module named 'no_package'"),
        (["--model.net=no_package.Net"], "net: No module named 'no_package'"),
        (["--data=NoData"], "data: No class NoData found"),
        (["--data.batch_size=0"], "`batch_size` must be at least 1, got 0."),
        (["--config=digits/dynamcgate"], "did you mean digits/dynamicgate?"),
        (["--config=nowhere.yaml"], "There is no config 'nowhere.yaml'"),
        (["--ckpt_path=nowhere.ckpt"], "'nowhere.ckpt'"),
        (["--ckpt_path=broken.ckpt"], "'broken.ckpt' is not a checkpoint, or is truncated"),
        (
            ["--trainer.callbacks+=GatePenalty", "--trainer.callbacks.weigth=1"],
            "did you mean weight?",
        ),
        (["--trainer.accelerator=abacus"], "invalid accelerator name"),
        (["--model.class_weights=[1,2]"], "`class_weights` must have 10 entries"),
        (["--config=broken.yaml"], "broken.yaml, line 2 is not YAML: expected ',' or"),
        (["--config=binary.yaml"], "binary.yaml is not text"),
        (["--ckpt_path=."], "No checkpoint found at '.'"),
        (["--ckpt_path=other.pt"], "'other.pt' is not a Lightning checkpoint"),
        (["--ckpt_path=best"], "No checkpoint found at 'best'"),
        (["--ckpt_path=last"], "No checkpoint found under runs/digits/dynamicgate"),
        (["--model.num_classes=7"], "has num_classes 7, but DigitsDataModule has 10: set model"),
        (["--model.input_shape=[9]"], "DigitsDataModule has [1, 8, 8]: set model.input_shape"),
        (["--model.net=torch.nn.Identity"], "GatedClassifier has no gate"),
        ([*PENALTY, "--trainer.callbacks.layers=[nope]"], "No gate matches 'nope'"),
        (["--model.optimizer.lr=-1"], "`optimizer`: AdamW failed: Invalid learning rate: -1.0"),
        (["--model.label_smoothing=2"], "`label_smoothing` must be in [0, 1], got 2.0."),
        (["--model.class_weights=ballanced"], "class_weights: expected list or 'balanced'"),
        (["--model.net.hidden=[0]"], "Widths must be at least 1, got [64, 0, 10]."),
        (["--model.gate_lr_factor=-3"], "`gate_lr_factor` must be at least 0, got -3.0."),
        (["--model.gate_clip_norm=0"], "`gate_clip_norm` must be above 0, got 0.0."),
        (["--model.class_weights=[-1,1,1,1,1,1,1,1,1,1]"], "`class_weights` must be at least 0"),
        (["--model.class_weights=[0,0,0,0,0,0,0,0,0,0]"], "`class_weights` must be at least 0"),
        (
            ["--model.net.gate={kind: dynamic, network: mlp, hidden: 0}"],
            "`hidden` must be at least",
        ),
        (["--model.num_classes=1"], "`num_classes` must be at least 2, got 1"),
        (["--seed_everything=-1"], "-1 is not in bounds"),
        (["--config=twice.yaml"], "twice.yaml, line 2: duplicate key 'trainer'"),
        (["--config=list.yaml"], "list.yaml holds no settings: write them as `name: value`."),
        (["--config=empty.yaml"], "empty.yaml holds no settings"),
        (["--ckpt_path=foreign.ckpt"], "'foreign.ckpt' is not a dg-lightning checkpoint"),
        (["--trainer.callbacks.GatePenaltty.weight=1"], "did you mean GatePenalty?"),
        (["--data.num_workers=-1"], "`num_workers` must be at least 0, got -1."),
        (["--data.split_seed=-4"], "`split_seed` must be at least 0, got -4."),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/acc"],
            "Early stopping conditioned on metric `val/acc` which is not available",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.ckpt").write_text("not a checkpoint")
    Path("broken.yaml").write_text("model: [unclosed\n  - {")
    Path("binary.yaml").write_bytes(bytes(range(256)))
    torch.save({"a": torch.zeros(2)}, "other.pt")
    foreign = {"pytorch-lightning_version": "2", "state_dict": {"w": torch.zeros(1)}}
    torch.save(foreign, "foreign.ckpt")
    Path("twice.yaml").write_text("trainer: {max_epochs: 1}\ntrainer: {max_steps: 3}\n")
    Path("typo.yaml").write_text("trainer: {max_epoch: 1}\n")
    Path("list.yaml").write_text("- a\n- b\n")
    Path("empty.yaml").write_text("# nothing\n")
    assert message in refused(capsys, "fit", "--config", "digits/dynamicgate", *SMALL, *arguments)


def test_evaluating_without_a_trained_checkpoint_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(capsys, "test", "--config", "digits/dynamicgate")
    assert "No checkpoint found under runs/digits/dynamicgate: run `dg-lightning fit` first" in line


@pytest.mark.parametrize("option", ["accumulate_grad_batches=0", "check_val_every_n_epoch=0"])
def test_what_nobody_has_foreseen_is_one_line_too(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config=digits/baseline", *SMALL, f"--trainer.{option}"])
    assert stopped.value.code == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("dg-lightning: err")]
    assert "ZeroDivisionError: " in line
    assert line.endswith("DG_TRACEBACK=1 shows the traceback.")


def test_an_error_of_the_users_own_code_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("failing.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Failing(Callback):\n"
        "    def on_fit_start(self, trainer, pl_module):\n"
        "        1 / 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--config=digits/baseline", *SMALL, "--trainer.callbacks+=failing.Failing"]
    with pytest.raises(ZeroDivisionError):
        main(["fit", *options])


@pytest.mark.slow
def test_a_wrong_command_as_a_process_has_exit_status_2_and_no_traceback(
    run_program: RunProgram,
) -> None:
    done = run_program("fit", "--config", "digits/dynamicgate", "--trainer.max_epoch=3")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("dg-lightning: error: unrecognized arguments: --trainer.max_epoch=3")
