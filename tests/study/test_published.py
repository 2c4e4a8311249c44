"""The paper's numbers, decoded: its own MAC rules give its own figures."""

import itertools
from typing import Any

import pytest

from dg_lightning.cli import shipped_configs
from dg_lightning.compute.metric import ComputeReport, LayerCompute
from dg_lightning.study.tables import published, relative_macs_by_rule


def net(widths: list[int], open_units: list[int | None], **first: Any) -> ComputeReport:
    """Return the ledger of an MLP with so many units open in each layer, the inputs first."""
    rates = [None if n is None else n / w for n, w in zip(open_units, widths, strict=True)]
    layers = [LayerCompute("in", is_map=False, open_rate_g=rates[0])] if rates[0] else []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(widths)):
        more = first if i == 0 else {}
        layers.append(LayerCompute(str(i), n_in * n_out, open_rate_g=rates[i + 1], **more))
    return ComputeReport(tuple(layers))


def test_mnist_612_inputs_and_246_units_are_the_papers_flops() -> None:
    report = net([784, 256, 10], [612, 246, None])
    share = relative_macs_by_rule(report, published("mnist")["rule"])
    assert (
        int(2 * share * report.macs_dense) == 318_263 + 1
    )  # 318,264; the script's float32 ends in 3
    assert 1 - share == pytest.approx(0.2171, abs=5e-5)
    paper = published("mnist")["rows"]["dynamicgate"]
    assert paper["macs_reduction"] == pytest.approx(1 - share, abs=5e-5)
    # What the published script ends with: all inputs open, all hidden units closed.
    closed = net([784, 256, 10], [784, 0, None])
    share = relative_macs_by_rule(closed, "fan_in")
    assert paper["script_macs_reduction"] == pytest.approx(1 - share, abs=5e-5)


def test_cifar_962_and_148_units_are_the_papers_share() -> None:
    report = net([3072, 1024, 512, 10], [None, 962, 148, None])
    share = relative_macs_by_rule(report, published("cifar10")["rule"])
    assert share == pytest.approx(0.8433, abs=5e-5)
    assert published("cifar10")["rows"]["dynamicgate"]["macs_reduction"] == pytest.approx(
        1 - share, abs=5e-4
    )
    assert report.relative_macs("g") == pytest.approx(0.8465, abs=5e-5)  # by the paper's formula


def test_speech_473_and_210_units_are_the_papers_macs() -> None:
    report = net([1640, 512, 256, 12], [None, 473, 210, None])
    share = relative_macs_by_rule(report, published("speech_commands")["rule"])
    assert share * report.macs_dense == pytest.approx(963_288)


def test_tiny_imagenet_counts_probabilities_and_connections() -> None:
    report = net(
        [12288, 256, 200], [None, 51, None], open_rate_p=0.1448, density=629_145 / 3_145_728
    )
    share = relative_macs_by_rule(report, published("tiny_imagenet")["rule"])
    assert 2 * share * report.macs_dense == pytest.approx(1_273_117, rel=1e-5)


def test_every_row_is_a_variant_that_ships() -> None:
    shipped = set(shipped_configs())
    for dataset in ("mnist", "cifar10", "tiny_imagenet", "speech_commands", "pbmc3k"):
        for variant, row in published(dataset)["rows"].items():
            assert f"{dataset}/{variant.removesuffix('_at_start')}" in shipped
            assert 0 < row["accuracy"] < 1
            assert 0 <= row.get("macs_reduction", 0) < 1
    assert published("something else")["rows"] == {}
