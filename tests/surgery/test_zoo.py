"""What is promised of gates in other people's models, for the architectures that people have."""

import copy
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from zoo_builders import hugging_face
from zoo_language import GROUPED
from zoo_models import ZOO, Architecture, run

from dg_lightning import add_gates, gate_layers, param_groups, remove_gates
from dg_lightning.callbacks import AddGates, GatePenalty, RigL
from dg_lightning.compute import ComputeLedger
from dg_lightning.compute.whole_net import FlopRecorder
from dg_lightning.surgery import CompactModel, compact, find_units, load_compact, save_compact
from dg_lightning.surgery.recording import arguments_of

STATIC: Any = {"kind": "static"}
KINDS = ("feed_forward", "heads", "channels")
GATED = [name for name, case in ZOO.items() if case.is_gated]
pytestmark = pytest.mark.slow


def built(name: str) -> tuple[Architecture, nn.Module, Any, dict[str, Any]]:
    """Return a model of random weights, without dropout, and the kinds of gates to put in."""
    torch.manual_seed(0)
    case = ZOO[name]
    model = case.build().eval()
    vary(model)
    remove_randomness(model)
    wanted = {kind: STATIC for kind in KINDS if getattr(case, kind)}
    return case, model, case.example(), wanted


@torch.no_grad()
def vary(model: nn.Module) -> None:
    """Change biases, norms and scales: many begin as 0 or 1, which would hide mistakes."""
    for parameter in model.parameters():
        if parameter.ndim < 2 or parameter.abs().max() < 0.01:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for child in model.modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.running_var is not None:
            assert child.running_mean is not None
            child.running_mean.normal_(std=0.1)
            child.running_var.uniform_(0.5, 1.5)


def remove_randomness(model: nn.Module) -> None:
    """Set every rate of dropout and of dropped paths and layers to 0."""
    for child in model.modules():
        drops = "drop" in type(child).__name__.lower() or "Stochastic" in type(child).__name__
        for key, value in list(vars(child).items()):
            if isinstance(value, float) and ("drop" in key or (drops and key == "p")):
                setattr(child, key, 0.0)


def close_half(model: nn.Module) -> None:
    """Close half of the blocks of every gate, at random."""
    generator = torch.Generator().manual_seed(0)
    for gate in gate_layers(model).values():
        logit: Tensor = gate.logit.data  # type: ignore[attr-defined]
        logit[torch.randperm(len(logit), generator=generator)[: len(logit) // 2]] = -1.0


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


def train_step(model: nn.Module, example: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return outputs and gradients of a step in training mode, in float64.

    Batch norm over a few samples makes rounding errors of float32 as large as the outputs.
    """
    twin = copy.deepcopy(model).double().train()
    outputs: list[Tensor] = []
    args, kwargs = arguments_of(twin, example)
    double = apply_to_collection(
        (args, kwargs), Tensor, lambda x: x.double() if x.is_floating_point() else x
    )
    apply_to_collection(twin(*double[0], **double[1]), Tensor, outputs.append)
    outputs = [output for output in outputs if output.requires_grad]
    torch.stack([(output.double() ** 2).mean() for output in outputs]).sum().backward()
    gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    return [output.detach() for output in outputs], gradients


class Subject:
    """An architecture with gates of which half are closed, and its outputs at each stage."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.case, self.model, self.example, wanted = built(name)
        self.keys = list(self.model.state_dict())
        self.dense = run(self.model, self.example)
        self.dense_flops = flops(self.model, self.example)
        self.found = add_gates(self.model, **wanted, example=self.example)
        self.opened = run(self.model, self.example)
        close_half(self.model)
        with FlopRecorder(self.model) as count:
            self.closed = run(self.model, self.example)
        self.count = count.result(samples(self.example))

    @cached_property
    def compact(self) -> CompactModel:
        return compact(self.model, self.example)


@pytest.fixture(scope="module", params=GATED)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


def test_units_are_found_and_the_rest_is_named(subject: Subject) -> None:
    found, case = subject.found, subject.case
    kinds: list[str] = [units.kind for units in found.units.values()]
    assert {kind: kinds.count(kind) for kind in KINDS} == {k: getattr(case, k) for k in KINDS}
    assert maps_of(subject.model) <= {*found.units, *found.skipped}


@pytest.mark.parametrize("name", sorted(ZOO.keys() - set(GATED)))
def test_where_nothing_is_gated_every_map_is_named(name: str) -> None:
    _, model, example, _ = built(name)
    found = find_units(model, example)
    assert not found.units
    assert maps_of(model) <= set(found.skipped)
    with pytest.raises(ValueError, match="feed_forward"):
        add_gates(model, feed_forward=STATIC, example=example)


def maps_of(model: nn.Module) -> set[str]:
    """Return the names of a model's maps, but not of those in groups."""
    maps = (nn.Linear, nn.Conv1d, nn.Conv2d)
    return {
        name
        for name, child in model.named_modules()
        if isinstance(child, maps) and getattr(child, "groups", 1) == 1
    }


def test_open_gates_change_no_bit_and_no_key(subject: Subject) -> None:
    for mine, theirs in zip(subject.opened, subject.dense, strict=True):
        assert torch.equal(mine, theirs)
    keys = [key for key in subject.model.state_dict() if ".dg_gate." not in key]
    assert keys == subject.keys
    assert not all(map(torch.equal, subject.closed, subject.dense))
    twin = copy.deepcopy(subject.model)
    remove_gates(twin)
    assert all(map(torch.equal, run(twin, subject.example), subject.dense))
    assert list(twin.state_dict()) == subject.keys


def test_a_compact_model_computes_the_same(subject: Subject) -> None:
    assert len(subject.compact.notes) == subject.case.notes
    outputs = run(subject.compact.model, subject.example)
    for mine, theirs in zip(outputs, subject.closed, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_compact_model_trains_the_same(subject: Subject) -> None:
    outputs, gradients = train_step(subject.compact.model, subject.example)
    expected, others = train_step(subject.model, subject.example)
    for mine, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if not subject.compact.notes:  # units that stay get gradients again
        shared = [name for name in gradients if gradients[name].shape == others[name].shape]
        assert shared
        for name in shared:
            torch.testing.assert_close(gradients[name], others[name], rtol=1e-4, atol=1e-5)


def test_the_ledger_counts_what_the_compact_model_computes(subject: Subject) -> None:
    count = samples(subject.example)
    ledger = ComputeLedger(subject.model)
    ledger.update(subject.model, count)
    report = ledger.report(subject.model, subject.count)
    assert bool(report.uncounted) == subject.case.uncounted
    assert 2 * count * report.macs_dense == subject.dense_flops
    executed = flops(subject.compact.model, subject.example) / (2 * count)
    if subject.case.notes:
        assert report.macs < executed
    else:
        assert report.macs == pytest.approx(executed, rel=1e-6)


def test_a_compact_model_is_saved_and_loaded(subject: Subject, tmp_path: Any) -> None:
    save_compact(subject.compact, tmp_path / "small.safetensors")
    loaded = load_compact(subject.case.build, tmp_path / "small.safetensors").eval()
    assert type(loaded) is type(subject.model)
    outputs = run(subject.compact.model, subject.example)
    assert all(map(torch.equal, run(loaded, subject.example), outputs))


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.generates])
def test_generating_goes_on_with_gates_and_without_closed_heads(name: str) -> None:
    _, model, example, wanted = built(name)
    prompt = {"input_ids": example["input_ids"]}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generate: Any = model.generate
    before = generate(**prompt, **options)
    add_gates(model, **wanted, example=example)
    assert torch.equal(generate(**prompt, **options), before)
    close_half(model)
    closed = generate(**prompt, **options)
    uncached = generate(**prompt, **options, use_cache=False)
    assert torch.equal(closed, uncached)
    small: Any = compact(model, example).model
    assert torch.equal(small.generate(**prompt, **options), closed)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Starcoder2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_as_many_heads_share_keys_as_there_are_keys(kind: str, attention: str) -> None:
    options = GROUPED | {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 64}
    torch.manual_seed(0)
    model: Any = hugging_face(f"{kind}ForCausalLM", **options)().eval()
    ids = torch.arange(14).reshape(2, 7) + 5
    add_gates(model, heads=STATIC, example={"input_ids": ids})
    close_half(model)
    small: Any = compact(model, {"input_ids": ids}).model
    padded = {"input_ids": ids, "attention_mask": (torch.arange(14).reshape(2, 7) > 2).long()}
    for net in (model, small):
        net.set_attn_implementation(attention)
    torch.testing.assert_close(run(small, padded)[0], run(model, padded)[0], rtol=1e-4, atol=1e-5)


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
        return torch.optim.AdamW(param_groups(self, lr=1e-3, gate_lr_factor=100.0))


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.resumes])
def test_it_trains_with_callbacks_and_resumes(name: str, tmp_path: Any) -> None:
    def fit(steps: int, path: Any) -> dict[str, Tensor]:
        _, model, example, wanted = built(name)
        callbacks = [
            AddGates(**wanted, submodule="model", example=example),
            GatePenalty(weight=100.0),
            RigL(0.5, every_n_steps=1, until="100%"),
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
