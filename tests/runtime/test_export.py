import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_nets import randomised

from dg_lightning import GatedMLP
from dg_lightning.runtime import export, plain_net
from dg_lightning.runtime.export import check_inputs
from dg_lightning.runtime.plain import GatedStep, load

STATIC: Any = {"kind": "static"}
FLOOR: Any = {"kind": "dynamic", "network": "low_rank", "rank": 3, "block_size": 4, "min_open": 2}
TOP_K: Any = {"kind": "dynamic", "network": "mlp", "hidden": 5, "policy": "top_k", "k": 6}
SCALED: Any = {**FLOOR, "scale": "probability"}
GATES = {"static": STATIC, "dynamic": FLOOR, "top k": TOP_K, "scaled": SCALED}
WITHOUT_US = """
import sys, torch
sys.modules["dg_lightning"] = None  # an import of it fails
from load_net import load
torch.save(load("net.safetensors")(torch.load("x.pt")), "y.pt")
"""


def net_with(gate: Any) -> Any:
    return randomised(GatedMLP(24, [32, 16], 5, gate=gate, input_gate=STATIC, activation="gelu"))


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("format", ["safetensors", "pt2", "onnx"])
def test_what_is_read_back_is_the_net_for_every_batch_size(
    gate: str, format: Any, tmp_path: Path
) -> None:
    for package in ("safetensors", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    net = net_with(GATES[gate])
    before = {name: value.clone() for name, value in net.state_dict().items()}
    made = plain_net(net)
    exported = export(net, made, format, tmp_path / "folder" / "net")
    assert exported.files[0] == tmp_path / "folder" / f"net.{format}"
    assert exported.difference < 1e-5
    assert exported.size == exported.files[0].stat().st_size > 0
    x = check_inputs(made, net, 40)
    for batch in (x[:1], x[:7], x):
        torch.testing.assert_close(exported.run(batch), net(batch).detach(), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not list((tmp_path / "folder").glob(".*"))  # nothing unfinished is left


def test_safetensors_load_without_us(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    net = net_with(FLOOR)
    made = plain_net(net)
    exported = export(net, made, "safetensors", tmp_path / "net")
    assert [path.name for path in exported.files] == [
        "net.safetensors",
        "net.recipe.json",
        "load_net.py",
    ]
    x = check_inputs(made, net)
    torch.save(x, tmp_path / "x.pt")
    subprocess.run([sys.executable, "-c", WITHOUT_US], cwd=tmp_path, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), net(x), atol=1e-5, rtol=1e-5)
    recipe = json.loads((tmp_path / "net.recipe.json").read_text())
    assert recipe["format"] == 1
    assert [step["kind"] for step in recipe["steps"]][:2] == ["flatten", "select"]


def test_a_file_of_a_later_format_is_refused(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    path = tmp_path / "net.safetensors"
    torch_files.save_file({"a": torch.zeros(1)}, path, {"recipe": '{"format": 2, "steps": []}'})
    with pytest.raises(ValueError, match="has format 2, expected 1"):
        load(str(path))


def test_a_file_that_differs_is_not_called_done(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    net = net_with(STATIC)
    made = plain_net(net)
    last: Any = made.net[-1]
    last.bias += 1.0
    (tmp_path / "net.safetensors").write_text("the one of yesterday")
    with pytest.raises(RuntimeError, match="was not written"):
        export(net, made, "safetensors", tmp_path / "net")
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]
    assert (tmp_path / "net.safetensors").read_text() == "the one of yesterday"
    with pytest.raises(ValueError, match="`format` must be one of safetensors, pt2, onnx"):
        export(net, made, "torchscript", tmp_path / "net")  # type: ignore[arg-type]


def test_inputs_for_the_check_stay_away_from_the_edge() -> None:
    net = net_with([FLOOR, STATIC])
    made = plain_net(net)
    x = check_inputs(made, net)
    step: Any = next(module for module in made.net if isinstance(module, GatedStep))
    h = made.net[1](x)  # the inputs that are read
    assert len(x) >= 20
    assert (step.probability(h) - step.threshold).abs().min() > 1e-4


def test_a_file_of_the_users_is_not_written_over(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    net = net_with(STATIC)
    (tmp_path / "load_net.py").write_text("import mine")
    with pytest.raises(ValueError, match=r"load_net\.py exists"):
        export(net, plain_net(net), "safetensors", tmp_path / "net")
    (tmp_path / "load_net.py").unlink()
    for _ in range(2):  # our own may be
        export(net, plain_net(net), "safetensors", tmp_path / "net")
    with pytest.raises(ValueError, match="`output` must be a file"):
        export(net, plain_net(net), "safetensors", Path("."))


def test_gates_on_the_edge_for_every_input_are_said_so() -> None:
    gate: Any = {"kind": "dynamic", "initial_open_rate": 0.5001}
    net = GatedMLP(6, [4], 2, gate=gate).eval()
    net.layers()[0].gate.network[0].bias.data.zero_()  # type: ignore[union-attr,index]
    with pytest.raises(ValueError, match=r"gate threshold.*`x`"):
        check_inputs(plain_net(net), net)
