"""What is promised of gates in other people's models, for the architectures that people have."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from zoo import ZOO, Architecture, run

from dg_lightning import add_gates, gate_layers, remove_gates
from dg_lightning.callbacks import AddGates, GatePenalty, RigL
from dg_lightning.compute import ComputeLedger
from dg_lightning.compute.whole_net import CountWholeNet
from dg_lightning.surgery import compact, find_units, load_compact, save_compact
from dg_lightning.surgery.recording import arguments_of

STATIC: Any = {"kind": "static"}
KINDS = ("feed_forward", "heads", "channels")
pytestmark = pytest.mark.slow
each = pytest.mark.parametrize("name", ZOO)


def built(name: str) -> tuple[Architecture, nn.Module, Any, dict[str, Any]]:
    torch.manual_seed(0)
    case = ZOO[name]
    model = case.build().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)  # some begin with an output of 0
    wanted = {kind: STATIC for kind in KINDS if getattr(case, kind)}
    return case, model, case.example(), wanted


def close_a_third(model: nn.Module) -> None:
    for gate in gate_layers(model).values():
        gate.logit.data[1::3] = -1.0  # type: ignore[attr-defined]


def samples(example: Any) -> int:
    return len(next(iter(example.values())) if isinstance(example, dict) else example)


def flops(model: nn.Module, example: Any) -> int:
    """Return torch's count, without fused kernels, which it does not know."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(model, example)
    torch.backends.mha.set_fastpath_enabled(enabled)
    return int(counter.get_total_flops())


@each
def test_units_are_found_and_the_rest_is_named(name: str) -> None:
    case, model, example, _ = built(name)
    found = find_units(model, example)
    kinds: list[str] = [units.kind for units in found.units.values()]
    assert {kind: kinds.count(kind) for kind in KINDS} == {k: getattr(case, k) for k in KINDS}
    maps = [n for n, child in model.named_modules() if isinstance(child, nn.Linear)]
    assert set(maps) <= {*found.units, *found.left_alone}


@each
def test_open_gates_change_no_bit_and_no_key(name: str) -> None:
    _, model, example, wanted = built(name)
    before, keys = run(model, example), list(model.state_dict())
    add_gates(model, **wanted, example=example)
    for mine, theirs in zip(run(model, example), before, strict=True):
        assert torch.equal(mine, theirs)
    assert [key for key in model.state_dict() if ".dg_gate." not in key] == keys
    close_a_third(model)
    assert not torch.equal(run(model, example)[0], before[0])
    remove_gates(model)
    assert torch.equal(run(model, example)[0], before[0])
    assert list(model.state_dict()) == keys


@each
def test_the_ledger_counts_what_the_compact_model_computes(name: str, tmp_path: Any) -> None:
    case, model, example, wanted = built(name)
    dense = flops(model, example)
    add_gates(model, **wanted, example=example)
    close_a_third(model)
    with CountWholeNet(model) as count:
        closed = run(model, example)
    ledger = ComputeLedger(model)
    ledger.update(model, samples(example))
    report = ledger.report(model, count.result(samples(example)))
    assert not report.uncounted
    assert 2 * samples(example) * report.macs_dense == dense
    result = compact(model, example)
    for mine, theirs in zip(run(result.model, example), closed, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if name == "t5":  # one tensor of zeros, of all heads, goes through all its layers
        assert len(result.notes) == 2
    else:
        assert not result.notes
        executed = flops(result.model, example) / (2 * samples(example))
        assert report.macs == pytest.approx(executed, rel=1e-6)
    save_compact(result, tmp_path / "small.safetensors")
    loaded = load_compact(case.build, tmp_path / "small.safetensors").eval()
    assert type(loaded) is type(model)
    outputs = run(result.model, example)
    for mine, theirs in zip(run(loaded, example), outputs, strict=True):
        assert torch.equal(mine, theirs)


class Lit(pl.LightningModule):
    """Somebody's project around a model."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model, self.example = model, example

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        args, kwargs = arguments_of(self.model, self.example)
        out = self.model(*args, **kwargs)
        first: Tensor = out if isinstance(out, Tensor) else out[0]
        return first.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@each
def test_it_trains_with_callbacks_and_resumes(name: str, tmp_path: Any) -> None:
    def fit(steps: int, path: Any) -> dict[str, Tensor]:
        _, model, example, wanted = built(name)
        callbacks = [
            AddGates(**wanted, module="model", example=example, learning_rate=0.1),
            GatePenalty(weight=100.0),
            RigL(0.5, every_n_steps=1, until=1.0),
        ]
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            callbacks=callbacks,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Lit(model.train(), example)
        trainer.fit(module, DataLoader(range(4)), ckpt_path=path)  # type: ignore[arg-type]
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return {key: value.clone() for key, value in module.state_dict().items()}

    first = fit(2, None)
    assert any(key.endswith("dg_gate.logit") for key in first)
    resumed = fit(3, tmp_path / "2.ckpt")
    gates = [key for key in first if key.endswith("dg_gate.logit")]
    assert all((resumed[key] < first[key]).all() for key in gates)  # the penalty closes them


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.generates])
def test_generating_goes_on_with_gates_and_without_closed_heads(name: str) -> None:
    _, model, example, wanted = built(name)
    prompt = {"input_ids": example["input_ids"]}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generate: Any = model.generate
    before = generate(**prompt, **options)
    add_gates(model, **wanted, example=example)
    assert torch.equal(generate(**prompt, **options), before)
    close_a_third(model)
    closed = generate(**prompt, **options)
    uncached = generate(**prompt, **options, use_cache=False)
    assert torch.equal(closed, uncached)
    small: Any = compact(model, example).model
    assert torch.equal(small.generate(**prompt, **options), closed)
