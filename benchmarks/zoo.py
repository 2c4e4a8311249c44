"""Put gates into the models of torchvision, timm and transformers, and compact them.

    python benchmarks/zoo.py torchvision --shard 0/2 --output rows_0.csv
    python benchmarks/zoo.py timm --output rows_timm.csv
    python benchmarks/zoo.py --page docs/zoo.md rows_*.csv

Every model has random weights. All torchvision classification models are built at full size, the
smallest model of each timm module, and a small version of every type of transformers. Half of all
units, heads and channels that can be gated are closed at random. A model is *exact* if

- gates that are open change no bit of the outputs, and closed ones do change them,
- the compact model has the outputs of the gated one, on the example and on other inputs,
- its MACs by torch's counter are those that the gates promised,
- and it is saved and loaded with the same outputs.

A model is *refused* if an error or note says why. Everything else is a *bug*. Each model runs in a
process of its own.
"""

import argparse
import csv
import importlib
import math
import multiprocessing
import queue
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dg_lightning import add_gates, gate_layers
from dg_lightning.compute import ComputeLedger
from dg_lightning.compute.whole_net import FlopRecorder
from dg_lightning.surgery import compact, find_units, load_compact, save_compact
from dg_lightning.surgery.recording import arguments_of

COLUMNS = ("library", "model", "parameters", "units", "kept_macs", "verdict", "reason")
KINDS = ("feed_forward", "heads", "channels")
SECONDS = 600  # for one model
TOLERANCE = 1e-4  # relative to the size of an output
SMALL: dict[str, Any] = {  # ending of a setting's name -> its value in a small model
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "hidden_dim": 64,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_attention_heads": 4,
    "attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "max_source_positions": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k": 2,
    "topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "rotary_dim": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
}
NAMES = ("pad_token_id", "bos_token_id", "eos_token_id")


def torchvision_models() -> Iterator[str]:
    """Yield the names of all classification models."""
    import torchvision

    yield from torchvision.models.list_models(module=torchvision.models)


def timm_models() -> Iterator[str]:
    """Yield the name of the smallest model of each module."""
    import timm

    for module in timm.list_modules():
        sizes = {}
        for name in timm.list_models(module=module):
            with torch.device("meta"):
                try:
                    model = timm.create_model(name)
                except Exception:  # some need real numbers, and some cannot be built
                    continue
            sizes[name] = sum(parameter.numel() for parameter in model.parameters())
        if sizes:
            yield min(sizes, key=sizes.__getitem__)


def transformers_models() -> Iterator[str]:
    """Yield all types that have a model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    yield from sorted(MODEL_MAPPING_NAMES)


def build_torchvision(name: str) -> nn.Module:
    """Build a model, vision transformers for small images."""
    import torchvision

    size = {"image_size": image_size(name)} if name.startswith("vit_") else {}
    auxiliary = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **size, **auxiliary)
    return model


def image_size(name: str) -> int:
    """Return the side of the images for a torchvision model."""
    if name.startswith("maxvit"):
        return 224
    if name.startswith("vit_"):
        return 4 * int(name.split("_")[-1])
    return 64


def build_timm(name: str) -> nn.Module:
    """Build a model."""
    import timm

    model: nn.Module = timm.create_model(name)
    return model


def build_transformers(name: str, grouped: bool = True) -> nn.Module:
    """Build a small model of a type, by default with two heads for each key."""
    from transformers import AutoConfig, AutoModel

    config, builder = AutoConfig.for_model(name), cast("Any", AutoModel)
    shrink(config, grouped)
    model: nn.Module = builder.from_config(config)
    return model


def shrink(config: Any, grouped: bool) -> None:
    """Make a config's sizes small."""
    sizes = SMALL if grouped else SMALL | {"num_key_value_heads": SMALL["num_attention_heads"]}
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value, grouped)
        elif key in NAMES and isinstance(value, int):
            setattr(config, key, NAMES.index(key))
        elif type(value) is int and value > 0:
            endings = [end for end in sizes if key == end or key.endswith("_" + end)]
            if endings:
                setattr(config, key, min(value, sizes[max(endings, key=len)]))
        elif isinstance(value, dict) and "mrope_section" in value:
            value["mrope_section"] = [2, 1, 1]  # parts of half a head
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[: getattr(config, "num_hidden_layers", 2)]


def build(library: str, name: str) -> tuple[nn.Module, Any]:
    """Build a model and inputs that it accepts."""
    if library != "transformers":
        model = globals()[f"build_{library}"](name).eval()
        side = image_size(name) if library == "torchvision" else 0
        return model, noise(*((3, side, side) if side else model.pretrained_cfg["input_size"]))
    errors = []
    for grouped in (True, False):
        try:
            model = build_transformers(name, grouped).eval()
        except Exception as error:  # the sizes do not fit this type
            errors.append(error)
            continue
        for example in examples_for(model):
            try:
                outputs(model, example)
            except Exception as error:  # the wrong inputs
                errors.append(error)
            else:
                return model, example
    raise errors[0]


def noise(*shape: int) -> Tensor:
    """Return two samples."""
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def examples_for(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield inputs that a model of transformers may accept, the most likely first."""
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 32)
    height, width = (side, side) if isinstance(side, int) else side
    image = {"pixel_values": noise(getattr(vision, "num_channels", 3), height, width)}
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    text = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        text["decoder_input_ids"] = ids.flip(1)
    found = getattr(model, "main_input_name", "input_ids")
    if found == "input_values":
        yield {"input_values": noise(4000)}
    yield from (image, text) if found == "pixel_values" else (text, image)
    yield text | image
    audio = getattr(config, "audio_config", config)
    bands = getattr(audio, "num_mel_bins", getattr(audio, "input_dim", 80))
    for shape in ((bands, 64), (64, bands)):
        yield {"input_features": noise(*shape)}
        yield {"input_features": noise(*shape), "decoder_input_ids": ids}


@torch.no_grad()
def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """Return all tensors that a model returns."""
    args, kwargs = arguments_of(model, example)
    found: list[Tensor] = []
    apply_to_collection(model(*args, **kwargs), Tensor, found.append)
    return found


def furthest(own: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest output."""
    if [x.shape for x in own] != [x.shape for x in others]:
        return float("inf")
    pairs = [(x.double(), y.double()) for x, y in zip(own, others, strict=True) if x.numel()]
    sizes = [float(y.abs().max()) for _, y in pairs]
    distances = [
        float((x - y).abs().max()) / max(size, 1e-3 * max(sizes), 1e-12)
        for (x, y), size in zip(pairs, sizes, strict=True)
    ]
    return max(math.inf if math.isnan(distance) else distance for distance in distances)


def other_inputs(example: Any) -> Any:
    """Return other inputs of the same kind."""

    def other(x: Tensor) -> Tensor:
        return x.flip(0) * 0.5 if x.is_floating_point() else x.flip(-1)

    return apply_to_collection(example, Tensor, other)


@torch.no_grad()
def vary(model: nn.Module) -> None:
    """Change biases, norms and scales: many begin as 0 or 1, which would hide mistakes."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim < 2 or parameter.abs().max() < 0.01:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def close_half(model: nn.Module) -> None:
    """Close half of the blocks of every gate, at random."""
    generator = torch.Generator().manual_seed(0)
    for gate in gate_layers(model).values():
        logit: Tensor = gate.logit.data  # type: ignore[attr-defined]
        logit[torch.randperm(len(logit), generator=generator)[: len(logit) // 2]] = -1.0


def torch_macs(model: nn.Module, example: Any) -> int:
    """Return the MACs by torch's counter."""
    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        outputs(model, example)
    return int(counter.get_total_flops()) // 2


def examine(library: str, name: str) -> dict[str, Any]:
    """Return the row of one model."""
    row: dict[str, Any] = {"library": library, "model": name}
    try:
        torch.manual_seed(0)
        model, example = build(library, name)
        vary(model)
        dense = outputs(model, example)
        if not all(bool(x.isfinite().all()) for x in dense):
            raise ValueError("outputs of random weights are not finite")
        if furthest(outputs(model, example), dense) > 0:
            raise ValueError("outputs are random in evaluation, too")
    except Exception as error:
        return row | {"verdict": "not built", "reason": first_line(error)}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    try:
        found = find_units(model, example)
        kinds = {unit.kind for unit in found.units.values()}
        if not kinds:
            reasons = sorted(set(found.skipped.values())) or ["no linear layers or convolutions"]
            return row | {"verdict": "refused", "reason": reasons[0]}
        row["units"] = len(found.units)
        settings: Any = {kind: {"kind": "static"} for kind in KINDS if kind in kinds}
        add_gates(model, **settings, example=example)
        opened = outputs(model, example)
        close_half(model)
        with FlopRecorder(model) as count:
            closed = outputs(model, example)
        small = compact(model, example)
    except ValueError as error:
        return row | {"verdict": "refused", "reason": first_line(error)}
    except Exception as error:
        traceback.print_exc()
        return row | {"verdict": "bug", "reason": f"{type(error).__name__}: {first_line(error)}"}
    samples = 2
    ledger = ComputeLedger(model)
    ledger.update(model, samples)
    report = ledger.report(model, count.result(samples))
    executed = torch_macs(small.model, example) / samples
    row["kept_macs"] = f"{executed / report.macs_dense:.3f}" if report.macs_dense else ""
    wrong = []
    if furthest(opened, dense) > 0:
        wrong.append("open gates change the outputs")
    if furthest(closed, dense) < TOLERANCE:
        wrong.append("closed gates change nothing")
    for inputs in (example, other_inputs(example)):
        distance = furthest(outputs(small.model, inputs), outputs(model, inputs))
        if distance > TOLERANCE:
            wrong.append(f"compact outputs differ by {distance:.1e}")
    if not small.notes and abs(report.macs - executed) > 1e-6 * executed:
        wrong.append(f"{report.macs:,.0f} MACs promised, {executed:,.0f} executed")
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_compact(small, Path(folder) / "small.safetensors")
            loaded = load_compact(
                lambda: build(library, name)[0], Path(folder) / "small.safetensors"
            )
            if furthest(outputs(loaded.eval(), example), outputs(small.model, example)) > 0:
                wrong.append("the loaded model differs")
    except Exception as error:
        wrong.append(f"not loaded: {first_line(error)}")
    if wrong:
        return row | {"verdict": "bug", "reason": "; ".join(wrong)}
    kept = f"{len(small.notes)} layers keep closed units" if small.notes else ""
    if small.notes and not small.units:
        return row | {"verdict": "refused", "reason": small.notes[0]}
    return row | {"verdict": "exact", "reason": kept}


def first_line(error: Exception) -> str:
    """Return the beginning of a message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def in_a_process(library: str, name: str, results: Any) -> None:
    """Examine a model and send its row."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    results.put(examine(library, name))


def rows_of(library: str, shard: str, only: str | None) -> Iterator[dict[str, Any]]:
    """Examine the models of a shard, each in a process."""
    index, count = map(int, shard.split("/"))
    names = [only] if only else list(globals()[f"{library}_models"]())[index::count]
    importlib.import_module(library)
    context = multiprocessing.get_context("fork")  # importing takes longer than a small model
    for name in names:
        results: Any = context.Queue()
        process = context.Process(target=in_a_process, args=(library, name, results))
        process.start()
        failed = {"library": library, "model": name, "verdict": "not finished"}
        try:
            yield results.get(timeout=SECONDS)
        except queue.Empty:  # the process takes too long, or died
            reason = f"after {SECONDS} s" if process.is_alive() else f"exit code {process.exitcode}"
            yield failed | {"reason": reason}
        process.kill()
        process.join()


def page(files: list[str]) -> str:
    """Return the matrix as a page of the documentation."""
    rows = []
    for file in files:
        with Path(file).open(encoding="utf-8") as lines:
            rows += list(csv.DictReader(lines))
    parts = ["# Tested models\n", (__doc__ or "").split("\n\n", 2)[2].strip() + "\n"]
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    verdicts = ["exact", "refused", "bug", "not finished", "not built"]
    parts.append("| library | models | " + " | ".join(verdicts) + " |")
    parts.append("|---|---:|" + "---:|" * len(verdicts))
    for library in libraries:
        of = [row["verdict"] for row in rows if row["library"] == library]
        counts = " | ".join(str(of.count(verdict)) for verdict in verdicts)
        parts.append(f"| {library} | {len(of)} | {counts} |")
    for library in libraries:
        parts.append(f"\n## {library}\n\n| model | layers with gates | MACs kept | verdict | |")
        parts.append("|---|---:|---:|---|---|")
        for row in rows:
            if row["library"] == library:
                reason = row["reason"].replace("|", "\\|").replace("<", "&lt;")
                cells = (
                    f"`{row['model']}`",
                    row["units"],
                    row["kept_macs"],
                    row["verdict"],
                    reason,
                )
                parts.append("| " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


def main() -> None:
    """Examine models, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=["torchvision", "timm", "transformers"], nargs="?")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--only")
    parser.add_argument("--output")
    parser.add_argument("--page", nargs="+", metavar="FILE")
    args = parser.parse_args()
    if args.page:
        target, *files = args.page
        Path(target).write_text(page(files), encoding="utf-8")
        return
    if args.library is None:
        parser.error("name a library, or --page")
    with Path(args.output or f"zoo_{args.library}.csv").open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows_of(args.library, args.shard, args.only):
            writer.writerow(row)
            file.flush()
            print(row["model"], row["verdict"], row.get("reason", ""), flush=True)


if __name__ == "__main__":
    main()
