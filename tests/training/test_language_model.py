from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dg_lightning import GatedLM, gate_layers
from dg_lightning.callbacks import BudgetController, CollapseDetector, GateMonitor
from dg_lightning.datamodules import TextDataModule
from dg_lightning.monitoring.report.page import read_run

GATE: Any = {
    "kind": "dynamic",
    "block_size": 8,
    "scale": "probability",
    "initial_spread": 1.0,
    "initial_open_rate": 0.7,
}


@pytest.fixture
def data(tmp_path: Path) -> TextDataModule:
    """Sentences of few words, so that something can be learned in a second."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = ["the gate ", "opens a ", "block of ", "units and ", "closes "]
    generator = torch.Generator().manual_seed(0)
    for index in range(9):
        drawn = torch.randint(5, (300,), generator=generator).tolist()
        (folder / f"{index}.txt").write_text("".join(words[i] for i in drawn))
    return TextDataModule(
        16,
        folder=str(folder),
        context=24,
        windows_per_epoch=320,
        eval_windows=40,
        samples=2,
        prompt="the ",
        sample_length=30,
        cache_dir=str(tmp_path / "cache"),
    )


def model(gate: Any = GATE, **options: Any) -> GatedLM:
    pl.seed_everything(0, verbose=False)
    arguments = {"width": 32, "depth": 2, "heads": 2, "hidden": 64, "gate": gate}
    net: Any = {"class_path": "dg_lightning.layers.GPT", "init_args": arguments}
    adam: Any = {"class_path": "AdamW", "init_args": {"lr": 3e-3}}
    return GatedLM(net, [24], 256, adam, **options)


def trainer(root: Path, callbacks: Any = (), epochs: int = 4) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[*callbacks],
        logger=pl.loggers.CSVLogger(root, ""),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=root,
    )


def test_it_learns_at_the_budget_and_loads_from_its_checkpoint(
    data: TextDataModule, tmp_path: Path
) -> None:
    shift = BudgetController(
        0.4, measure="open_rate", method="shift", begin="0%", until="40%", freeze_at="60%"
    )
    lm = model()
    run = trainer(tmp_path, [GateMonitor(every_n_epochs=0), CollapseDetector(), shift])
    run.fit(lm, data)
    logged = run.callback_metrics
    assert logged["val/loss"] < 1.5  # 5.5 at first, 0.4 if all is known
    assert shift.landed
    assert shift.reached == pytest.approx(0.4, abs=0.02)
    assert logged["gates/open_rate"] == pytest.approx(0.4, abs=0.05)
    # The ledger counts a token.
    assert lm.compute_report is not None
    maps = [x for x in lm.compute_report.layers if "feed_forward" in x.name]
    assert sum(x.macs_dense for x in maps) == 2 * 2 * 32 * 64
    used = sum(x.macs for x in maps) / sum(x.macs_dense for x in maps)
    assert used == pytest.approx(float(logged["gates/open_rate"]), abs=0.01)
    path = tmp_path / "end.ckpt"
    run.save_checkpoint(path)
    loaded = GatedLM.load_from_checkpoint(path).eval()
    x = torch.randint(256, (2, 24))
    torch.testing.assert_close(loaded(x), lm.eval()(x))
    # Open rates by token: those that were seen, and no others.
    record = read_run(Path(run.loggers[0].log_dir or ""))
    units = record.classes
    assert set(units) == set(gate_layers(lm))
    names, shares = units["net.blocks.0.feed_forward.gate"]
    assert names[ord("g")] == "g"
    assert shares[ord("g")].isfinite().all()
    assert shares[ord("Z")].isnan().all()
    # And by position: their mean is the open rate.
    by_position = record.positions["net.blocks.0.feed_forward.gate"]
    assert [place for place, _ in by_position] == list(range(24))
    mean = sum(share for _, share in by_position) / 24
    rate = logged["gates/open_rate/net.blocks.0.feed_forward.gate"]
    assert mean == pytest.approx(float(rate), abs=1e-4)


class Loads(pl.Callback):
    """Collects the share of tokens that open each block of each gate."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        opened = [(gate.gate != 0).float() for gate in gate_layers(pl_module).values()]  # type: ignore[union-attr]
        self.seen.append(torch.stack([rows.flatten(0, -2).mean(0) for rows in opened]))


def test_balance_opens_every_block_for_as_many_tokens(data: TextDataModule, tmp_path: Path) -> None:
    ends = {}
    gate = {**GATE, "initial_open_rate": 0.25}
    for method in ("shift", "balance"):
        loads = Loads()
        times: Any = {"begin": "0%", "until": "0%", "freeze_at": "80%"}
        controller = BudgetController(0.25, "open_rate", method, **times)
        lm = model(gate)
        run = trainer(tmp_path, [controller, loads], epochs=8)
        run.fit(lm, data)
        ends[method] = torch.stack(loads.seen[64:128]).mean(0)  # in the second half
        assert controller.reached == pytest.approx(0.25, rel=0.02)  # in validation
    assert ends["balance"].mean().item() == pytest.approx(0.25, abs=0.015)
    assert ends["balance"].std() < 0.25 * ends["shift"].std()
    assert ends["balance"].min() > 0.2  # no block dies
    key = "gates/load_spread/net.blocks.0.feed_forward.gate"
    assert 0 < float(run.callback_metrics[key]) < 0.5


def test_balance_evens_the_loads_of_a_fixed_number_of_blocks(
    data: TextDataModule, tmp_path: Path
) -> None:
    ends = {}
    gate = {**GATE, "policy": "top_k", "k": "25%", "initial_open_rate": 0.25}
    for callbacks in (
        [],
        [BudgetController(0.25, "open_rate", "balance", begin="0%", freeze_at="100%")],
    ):
        loads = Loads()
        lm = model(gate)
        run = trainer(tmp_path, [*callbacks, loads], epochs=8)
        run.fit(lm, data)
        ends[len(callbacks)] = torch.stack(loads.seen[64:128]).mean(0)
    torch.testing.assert_close(ends[1].mean(), torch.tensor(0.25))
    assert ends[1].std() < 0.25 * ends[0].std()
    assert float(run.callback_metrics["gates/budget_used"]) == pytest.approx(0.25)


def test_its_loss_is_in_nats_a_token(data: TextDataModule, tmp_path: Path) -> None:
    lm = model(gate=None)
    run = trainer(tmp_path)
    (logged,) = run.validate(lm, data, verbose=False)
    lm.eval()
    losses = [F.cross_entropy(lm(x).mT, y, reduction="sum") for x, y in data.val_dataloader()]
    assert logged["val/loss"] == pytest.approx(float(torch.stack(losses).sum().detach()) / 960)
    hits = [(lm(x).argmax(-1) == y).float().mean() for x, y in data.val_dataloader()]
    assert logged["val/accuracy"] == pytest.approx(
        sum(float(h) * n for h, n in zip(hits, (16, 16, 8), strict=True)) / 40, abs=1e-6
    )


def test_it_continues_prompts(data: TextDataModule, tmp_path: Path) -> None:
    lm = model()
    (tokens,) = trainer(tmp_path).predict(lm, data) or []
    assert tokens.shape == (2, 34)  # type: ignore[union-attr]
    assert data.text_of(tokens[0].tolist()).startswith("the ")
    assert lm.net.blocks[0].feed_forward.skip is None  # type: ignore[union-attr, index]
    lm.on_predict_start()
    feed_forward: Any = lm.net.blocks[0].feed_forward  # type: ignore[union-attr, index]
    assert feed_forward.skip is not None


def test_a_net_with_a_generator_of_its_own_continues_prompts(
    data: TextDataModule, tmp_path: Path
) -> None:
    class Own(nn.Module):
        def generate(self, x: Any, length: int, temperature: float, generator: Any) -> Any:
            return x.repeat(1, 2)

    lm = GatedLM(Own(), [24], 256)
    (tokens,) = trainer(tmp_path).predict(lm, data) or []
    assert tokens[0].tolist() == 2 * list(b"the ")


def test_it_trains_the_same_where_closed_blocks_are_skipped(
    data: TextDataModule, tmp_path: Path
) -> None:
    losses = []
    for engine in ("masked", "blocks"):
        lm = model(engine=engine)
        run = trainer(tmp_path / engine, epochs=1)
        run.fit(lm, data)
        losses.append(float(run.callback_metrics["val/loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] < 4


def test_a_text_is_drawn_whatever_the_context_of_the_data_is(
    data: TextDataModule, tmp_path: Path
) -> None:
    lm = model()
    training = trainer(tmp_path, epochs=1)
    training.fit(lm, data)
    training.save_checkpoint(tmp_path / "some.ckpt")
    other = TextDataModule(16, folder=str(data.folder), samples=2, prompt="the ", sample_length=8)
    assert other.context != data.context
    for drawing in (lm, GatedLM.load_from_checkpoint(tmp_path / "some.ckpt")):
        (drawn,) = trainer(tmp_path).predict(drawing, other) or []
        assert [len(row) for row in drawn] == [4 + 8] * 2
