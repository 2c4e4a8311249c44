from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_classifier import Blobs, model_of, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedClassifier, gate_layers


class WithAuxiliary(nn.Module):
    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.flatten(1))
        return out

    def auxiliary_loss(self) -> Tensor:
        return self.linear.weight.square().sum()


def test_learns_and_logs_the_keys_of_the_api(tmp_path: Path) -> None:
    model = model_of(optimizer={"class_path": "AdamW", "init_args": {"lr": 0.01}})
    trainer = trainer_of(tmp_path, max_epochs=15)
    trainer.fit(model, datamodule=Blobs())
    proxies = {f"{name}_{kind}" for name in ("relmac", "relmac_fuse", "proxy") for kind in "pg"}
    counts = {"macs", "macs_dense", "macs_share", "macs_expected", "macs_as_implemented"}
    counts |= {"gate_macs"}
    ledger = {f"compute/{name}" for name in proxies | counts}
    evaluated = {"loss", "accuracy", "macro_f1"}
    expected = {"train/loss", "train/task_loss"} | {f"val/{name}" for name in evaluated} | ledger
    assert set(trainer.callback_metrics) == expected
    assert trainer.callback_metrics["val/accuracy"] > 0.9
    trainer.test(model, datamodule=Blobs())
    assert set(trainer.callback_metrics) == {f"test/{name}" for name in evaluated} | ledger


def test_accuracy_and_macs_come_from_the_same_hard_gates(tmp_path: Path) -> None:
    data = Blobs()
    model = model_of()
    for gate in gate_layers(model).values():
        for parameter in gate.parameters():  # type: ignore[attr-defined]
            nn.init.normal_(parameter)
    (figures,) = trainer_of(tmp_path).test(model, datamodule=data, verbose=False)
    model.eval()
    with torch.no_grad():
        logits = model(data.x)
    assert figures["test/accuracy"] == pytest.approx(
        (logits.argmax(-1) == data.y).float().mean().item()
    )
    assert figures["test/loss"] == pytest.approx(F.cross_entropy(logits, data.y).item(), rel=1e-5)
    inputs, first, second = (
        g.gate.expand(100, -1).sum(-1)  # type: ignore[union-attr]
        for g in gate_layers(model).values()
    )
    macs = inputs * first + first * second + second * 3
    deciding = inputs * 2 + 2 * 12 + first * 2 + 2 * 8
    assert figures["compute/macs"] == pytest.approx((macs + deciding).mean().item())
    assert figures["compute/gate_macs"] == pytest.approx(deciding.mean().item())


def test_reloads_from_a_checkpoint_with_no_further_argument(tmp_path: Path) -> None:
    model = model_of(class_weights="balanced", label_smoothing=0.1)
    trainer = trainer_of(tmp_path)
    trainer.fit(model, datamodule=Blobs())
    path = tmp_path / "model.ckpt"
    gate_layers(model)["net.input_gate"].temperature.fill_(0.3)
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    again = GatedClassifier.load_from_checkpoint(path, weights_only=True)
    assert again.hparams == model.hparams
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    data = Blobs()
    assert torch.equal(again.eval()(data.x), model.eval()(data.x))


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = model_of()
    trainer_of(tmp_path / "whole", max_epochs=4).fit(whole, datamodule=Blobs())
    half = model_of()
    first = trainer_of(tmp_path / "half", max_epochs=2)
    first.fit(half, datamodule=Blobs())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = model_of()
    trainer_of(tmp_path / "half", max_epochs=4).fit(
        resumed, datamodule=Blobs(), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_an_interrupted_evaluation_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupted(pl.Callback):
        def on_validation_batch_end(self, *args: Any) -> None:
            raise RuntimeError("stop here")

    model = model_of()
    with pytest.raises(RuntimeError, match="stop here"):
        trainer_of(tmp_path, callbacks=[Interrupted()]).validate(model, datamodule=Blobs())
    for gate in gate_layers(model).values():
        gate.shift_bias(-50.0)
    (figures,) = trainer_of(tmp_path).validate(model, datamodule=Blobs(), verbose=False)
    assert figures["compute/proxy_g"] == 0
    assert model.compute_report is not None
    assert model.compute_report.macs == figures["compute/macs"]


@pytest.mark.slow
def test_two_processes_train_to_the_same_weights_and_agree_on_the_figures(
    in_two_processes: Callable[[str], list[Any]],
) -> None:
    one, other = in_two_processes("""
from test_classifier import Blobs, model_of, trainer_of
model = model_of()
trainer = trainer_of(".", strategy="ddp", devices=2, enable_checkpointing=False)
trainer.fit(model, datamodule=Blobs(batch_size=8))
result = {k: v.sum().item() for k, v in model.state_dict().items()}
result |= {k: v.item() for k, v in trainer.callback_metrics.items() if "train" not in k}
""")
    assert one == other
    assert one["compute/macs_dense"] == 6 * 12 + 12 * 8 + 8 * 3


def test_class_weights_and_label_smoothing_reach_the_loss(tmp_path: Path) -> None:
    data = Blobs()
    logits, y = torch.randn(5, 3), torch.tensor([0, 2, 1, 0, 2])
    model = model_of(class_weights=[1.0, 2.0, 3.0], label_smoothing=0.2)
    weight = torch.tensor([1.0, 2.0, 3.0])
    expected = F.cross_entropy(logits, y, weight, label_smoothing=0.2)
    assert torch.equal(model.task_loss(logits, y), expected)
    model = model_of(class_weights="balanced")
    trainer_of(tmp_path, fast_dev_run=True).fit(model, datamodule=data)
    torch.testing.assert_close(model.class_weights, torch.tensor([100 / 180, 100 / 90, 100 / 30]))
    with pytest.raises(ValueError, match=r"`class_weights` must have 3 entries.* got 2"):
        model_of(class_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="needs a DataModule with `class_weights`"):
        trainer_of(tmp_path, fast_dev_run=True).fit(
            model_of(class_weights="balanced"), data.train_dataloader(), data.val_dataloader()
        )


def test_an_auxiliary_loss_of_the_net_is_added_and_logged(tmp_path: Path) -> None:
    spec: Any = {"class_path": f"{__name__}.WithAuxiliary"}
    model = model_of(net=spec)
    data = Blobs()
    batch = (data.x, data.y)
    auxiliary = model.net.auxiliary_loss()  # type: ignore[operator]
    loss = model.training_step(batch, 0)
    torch.testing.assert_close(loss, F.cross_entropy(model(data.x), data.y) + auxiliary)
    trainer = trainer_of(tmp_path, fast_dev_run=True)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["train/aux_loss"] > 0
    assert trainer.callback_metrics["train/loss"] > trainer.callback_metrics["train/task_loss"]


def test_a_data_module_with_another_number_of_classes_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has num_classes 4, but Blobs has 3: set model"):
        trainer_of(tmp_path, fast_dev_run=True).fit(model_of(num_classes=4), datamodule=Blobs())
    with pytest.raises(ValueError, match=r"Blobs has \[2, 3\]: set model.input_shape=\[2, 3\]"):
        trainer_of(tmp_path, fast_dev_run=True).fit(model_of(input_shape=[6]), datamodule=Blobs())
    with pytest.raises(ValueError, match="`num_classes` is not set"):
        model_of(num_classes=None)
    with pytest.raises(ValueError, match=r"`label_smoothing` must be in \[0, 1\], got 2"):
        model_of(label_smoothing=2)


def test_predicts_labels_and_probabilities(tmp_path: Path) -> None:
    data = Blobs()
    model = model_of()
    batches = trainer_of(tmp_path).predict(model, datamodule=data)
    assert batches is not None
    probability = torch.cat([b["probability"] for b in batches])  # type: ignore[call-overload]
    torch.testing.assert_close(probability.sum(-1), torch.ones(100))
    labels = torch.cat([b["prediction"] for b in batches])  # type: ignore[call-overload]
    assert torch.equal(labels, model.eval()(data.x).argmax(-1))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_train_and_keep_the_gates_wide(tmp_path: Path, precision: Any) -> None:
    model = model_of()
    trainer_of(tmp_path, precision=precision, fast_dev_run=3).fit(model, datamodule=Blobs())
    assert {p.dtype for p in model.gate_parameters()} <= {torch.float32, torch.float64}


def test_a_second_fit_accumulation_and_ddp_ready_parameters(tmp_path: Path) -> None:
    model = model_of()
    trainer = trainer_of(tmp_path, max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(model, datamodule=Blobs())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, datamodule=Blobs())
    assert trainer.current_epoch == 2
    model.train()
    model.zero_grad()
    model(Blobs().x).square().sum().backward()
    # With plain `strategy: ddp` every parameter must take part in every step.
    assert all(p.grad is not None for p in model.parameters())


def test_targets_may_have_a_class_for_each_pixel(tmp_path: Path) -> None:
    arguments = {"in_channels": 1, "out_channels": 3, "kernel_size": 1}
    spec: Any = {"class_path": "torch.nn.Conv2d", "init_args": arguments}
    model = GatedClassifier(spec, [1, 4, 4], 3)
    images, classes = torch.randn(10, 1, 4, 4), torch.randint(3, (10, 4, 4))
    loader = DataLoader(TensorDataset(images, classes), batch_size=5)
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    (logged,) = trainer.validate(model, loader, verbose=False)
    with torch.no_grad():
        hits = (model(images).argmax(1) == classes).float().mean()
    assert logged["val/accuracy"] == pytest.approx(float(hits))
