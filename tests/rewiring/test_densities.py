from itertools import pairwise

import pytest

from dg_lightning.rewiring import densities


def sparsities(widths: tuple[int, ...], sparsity: float) -> list[float]:
    shapes = {str(i): (out, into) for i, (into, out) in enumerate(pairwise(widths))}
    return [1 - d for d in densities(shapes, 1 - sparsity).values()]


# By the original formula: saturated layers become dense, and the rest is solved again.
@pytest.mark.parametrize(
    ("widths", "sparsity", "expected"),
    [
        ((784, 300, 100, 10), 0.5, (0.5659, 0, 0)),
        ((784, 300, 100, 10), 0.8, (0.8378, 0.5306, 0)),
        ((784, 300, 100, 10), 0.9, (0.9204, 0.7698, 0)),
        ((784, 300, 100, 10), 0.95, (0.9615, 0.8887, 0.0815)),
        ((3072, 512, 512, 10), 0.5, (0.5476, 0.2244, 0)),
        ((3072, 512, 512, 10), 0.8, (0.8205, 0.6924, 0)),
        ((3072, 512, 512, 10), 0.9, (0.9115, 0.8483, 0)),
        ((3072, 512, 512, 10), 0.95, (0.9570, 0.9263, 0)),
        ((784, 1024, 1024, 1024, 10), 0.8, (0.7819, 0.8108, 0.8108, 0)),
        ((784, 1024, 1024, 1024, 10), 0.9, (0.8929, 0.9071, 0.9071, 0)),
        ((784, 1024, 1024, 1024, 10), 0.95, (0.9484, 0.9553, 0.9553, 0)),
        ((784, 1024, 1024, 1024, 10), 0.98, (0.9811, 0.9836, 0.9836, 0.1529)),
    ],
)
def test_erk_of_published_nets(
    widths: tuple[int, ...], sparsity: float, expected: tuple[float, ...]
) -> None:
    assert sparsities(widths, sparsity) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("distribution", ["uniform", "er", "erk"])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 0.9, 1.0])
def test_the_total_is_what_was_asked_for(distribution: str, density: float) -> None:
    shapes = {"conv": (64, 3, 3, 3), "wide": (512, 576), "small": (10, 512)}
    sizes = {"conv": 1728, "wide": 294_912, "small": 5120}
    found = densities(shapes, density, distribution)  # type: ignore[arg-type]
    assert sum(found[n] * sizes[n] for n in sizes) == pytest.approx(density * sum(sizes.values()))
    assert all(0 < d <= 1 for d in found.values())


def test_er_leaves_the_kernel_out() -> None:
    shapes = {"conv": (8, 8, 3, 3), "linear": (64, 64)}
    er, erk = densities(shapes, 0.2, "er"), densities(shapes, 0.2, "erk")
    assert er["conv"] / er["linear"] == pytest.approx((16 / 64) / (128 / 4096))
    assert erk["conv"] / erk["linear"] == pytest.approx((22 / 576) / (128 / 4096))


@pytest.mark.parametrize("density", [0.0, 1.1])
def test_a_density_out_of_range_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match="`density` must be in"):
        densities({"a": (2, 2)}, density)
