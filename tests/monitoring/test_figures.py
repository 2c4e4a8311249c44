"""What is drawn of a gate: as the image, the colours or the genes that it gates."""

from typing import Any

import pytest
import torch

from dg_lightning.monitoring import gate_figure, render_rgb
from dg_lightning.monitoring.activity import BINS, GateSnapshot, HistoryEntry

pytest.importorskip("matplotlib", reason="needs the extra plot")


def look(units: int, classes: int = 0) -> GateSnapshot:
    g = torch.linspace(0, 1, units)
    by_class = torch.rand(classes, units) if classes else None
    return GateSnapshot(
        "net.input_gate", 1, g, g, torch.full((BINS,), 1 / BINS), by_class, 1.0, 0.5
    )


def titles(figure: object) -> list[str]:
    return [axis.get_title() for axis in figure.axes]  # type: ignore[attr-defined]


def test_a_gate_on_an_image_shows_the_image_with_unit_0_at_its_corner() -> None:
    gate = look(784)
    figure = gate_figure(gate, [HistoryEntry.from_gates(0, 1, [gate])], input_shape=(1, 28, 28))
    assert titles(figure)[0] == "open rate, as the input"
    shown: Any = figure.axes[0].images[0].get_array()
    assert shown.shape == (28, 28)
    assert (shown[0, 0], shown[27, 27]) == (0, 1)


def test_colours_are_drawn_as_colours() -> None:
    gate = look(12)
    figure = gate_figure(gate, [HistoryEntry.from_gates(0, 1, [gate])], input_shape=(3, 2, 2))
    shown: Any = figure.axes[0].images[0].get_array()
    assert shown.shape == (2, 2, 3)
    assert shown[0, 0].tolist() == pytest.approx(gate.g[[0, 4, 8]].tolist())


def test_genes_are_listed_the_most_open_first() -> None:
    gate = look(40)
    names = [f"GENE{index}" for index in range(40)]
    figure = gate_figure(gate, [HistoryEntry.from_gates(0, 1, [gate])], [40], feature_names=names)
    written = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert written[:3] == ["GENE39", "GENE38", "GENE37"]
    assert len(written) == 25


def test_all_pictures_have_one_size_and_classes_their_names() -> None:
    hidden, with_image = look(16, classes=2), look(784)
    figure = gate_figure(
        hidden, [HistoryEntry.from_gates(0, 1, [hidden])], class_names=["cat", "dog"]
    )
    assert "share by class" in titles(figure)
    labels = [label.get_text() for axis in figure.axes for label in axis.get_xticklabels()]
    assert {"cat", "dog"} <= set(labels)
    other = gate_figure(with_image, [HistoryEntry.from_gates(0, 1, [with_image])], (1, 28, 28))
    assert render_rgb(figure).shape == render_rgb(other).shape == (360, 1200, 3)
