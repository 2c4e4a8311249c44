import csv
import os
from pathlib import Path

import pytest
import torch
import yaml

from dg_lightning.cli import main

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SMALL = [
    "--trainer.max_epochs=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]


@pytest.mark.slow
def test_newest_checkpoint_is_used_and_resume_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--config", "digits/dynamicgate", *SMALL]
    main(["fit", *options])
    first = Path("runs/digits/dynamicgate/version_0/checkpoints/last.ckpt")
    main(["fit", *options, "--trainer.max_epochs=3", "--ckpt_path", str(first)])
    second = Path("runs/digits/dynamicgate/version_1/checkpoints/last.ckpt")
    assert torch.load(second, weights_only=True)["epoch"] == 2
    main(["validate", *options])
    assert f"Using the newest checkpoint, {second}" in caplog.text
    main(["predict", *options])
    rows = list(csv.DictReader((second.parents[2] / "version_3" / "predictions.csv").open()))
    assert [int(row["index"]) for row in rows] == list(range(360))
    assert {row["prediction"] for row in rows} <= set("0123456789")


@pytest.mark.slow
def test_a_run_resumed_after_an_epoch_ends_as_the_uninterrupted_one() -> None:
    options = ["--config=digits/dynamicgate", *SMALL]
    main(["fit", *options, "--trainer.max_epochs=3", "--trainer.logger.save_dir=whole"])
    main(["fit", *options, "--trainer.max_epochs=1"])
    main(["fit", *options, "--trainer.max_epochs=3", "--ckpt_path=last"])
    states = []
    for folder in ("whole/digits/dynamicgate/version_0", "runs/digits/dynamicgate/version_1"):
        states.append(
            torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        )
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.slow
def test_a_checkpoint_brings_its_own_model_and_says_where_it_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    main(["fit", "--config=digits/dynamicgate", "--model.net.hidden=[24]", *SMALL])
    gated = "runs/digits/dynamicgate/version_0/checkpoints/last.ckpt"
    main(["test", "--config=digits/dynamicgate", *SMALL])
    assert "differs from the config in model.net.init_args.hidden." in caplog.text
    main(["fit", "--config=digits/baseline", *SMALL])
    dense = "runs/digits/baseline/version_0/checkpoints/last.ckpt"
    caplog.clear()
    # In either direction the net is the checkpoint's: gates neither appear nor vanish.
    main(["test", "--config=digits/dynamicgate", f"--ckpt_path={dense}", *SMALL])
    assert "model.net.init_args.gate" in caplog.text
    main(["test", "--config=digits/baseline", f"--ckpt_path={gated}", *SMALL])
    configs = [
        Path(f"runs/digits/{v}/config.yaml")
        for v in ("dynamicgate/version_2", "baseline/version_1")
    ]
    nets = [
        yaml.safe_load(c.read_text())["model"]["init_args"]["net"]["init_args"] for c in configs
    ]
    assert [net["hidden"] for net in nets] == [[256, 128], [24]]
    assert [net.get("gate") is None for net in nets] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--trainer.logger=false"],
        ["--trainer.logger=true"],
        ["--trainer.logger.version=mine"],
        ["--trainer.logger=null", "--trainer.default_root_dir=elsewhere"],
        ["--trainer.callbacks.dirpath=kept"],
    ],
    ids=lambda options: options[-1],
)
def test_what_fit_has_written_is_found_again(
    options: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    common = ["--config=digits/baseline", *SMALL, *options]
    main(["fit", *common])
    main(["test", *common])
    (written,) = Path().rglob("last.ckpt")
    assert f"Using the newest checkpoint, {written}" in caplog.text
    main(["fit", *common, "--ckpt_path=last", "--trainer.max_epochs=3"])
    assert torch.load(max(Path().rglob("last.ckpt"), key=os.path.getmtime))["epoch"] == 2
