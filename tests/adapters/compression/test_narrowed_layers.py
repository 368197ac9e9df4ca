"""Choices of the layout `narrow`: values, rotary planes and neurons, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracles import isometry, normal
from tnlib_adapters.compression.layouts.structured_pruning import (
    RotaryPlanes,
    choose_neurons,
    choose_planes,
    truncate_values,
)
from tnlib_adapters.factors.projections import Projections, Sizes

SIZES = Sizes(n_layers=1, n_heads=4, d_model=12, kv_heads=2, d_head=6)


def layer() -> Projections:
    shapes = {"q": (12, 24), "k": (12, 12), "v": (12, 12), "o": (24, 12)}
    weights = {name: normal(shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    return Projections(weights, {})


def test_with_a_text_the_error_is_that_of_its_outputs() -> None:
    """One head per group: no projection of this rank has a smaller error in the moments."""
    sizes = Sizes(n_layers=1, n_heads=2, d_model=12, kv_heads=2, d_head=6)
    whole = layer()
    before = Projections({**whole.weights, "o": whole.weights["o"][:12]}, {})
    y, p = normal((200, 12), seed=3) @ np.diag(2.0 ** -np.arange(12)), normal((200, 12), seed=4)
    mixed, slopes = y.T @ y, p.T @ p
    after = truncate_values(before, sizes, 2, mixed, slopes)
    values, outputs = (before.weights[name].astype(float) for name in "vo")
    for group in range(2):
        own = slice(6 * group, 6 * group + 6)
        root = np.linalg.cholesky(mixed[own, own]).T, np.linalg.cholesky(outputs[own] @ slopes @ outputs[own].T)
        s = np.linalg.svd(root[0] @ root[1], compute_uv=False)
        left = np.linalg.lstsq(values[:, own], after.weights["v"][:, own], rcond=None)[0][:, :2]
        right = np.linalg.lstsq(outputs[own].T, after.weights["o"][own].T, rcond=None)[0].T[:2]
        error = np.linalg.norm(root[0] @ (np.eye(6) - left @ right) @ root[1])
        assert error == pytest.approx(np.sqrt(np.sum(s[2:] ** 2)), rel=1e-6)


@pytest.mark.parametrize("n_planes", [1, 2, 5, 8])
def test_frequencies_of_equally_spaced_planes_are_those_of_a_narrower_head(n_planes: int) -> None:
    base, old = 500.0, 500.0 ** (-np.arange(n_planes) / n_planes)
    for start, step, count in itertools.product(range(n_planes), range(1, n_planes + 1), range(1, n_planes + 1)):
        if start + step * (count - 1) < n_planes:
            planes = RotaryPlanes(start, step, count, n_planes)
            new = planes.base(base) ** (-np.arange(count) / count) / planes.factor(base)
            np.testing.assert_allclose(new, old[planes.indices], rtol=1e-13)


def test_the_planes_of_largest_loss_are_chosen() -> None:
    rng = np.random.default_rng(0)
    for count in range(1, 9):
        losses = rng.random(8)
        chosen = choose_planes(losses, count)
        spaced = (range(a, 8, s)[:count] for a in range(8) for s in range(1, 9))
        assert losses[chosen.indices].sum() == max(losses[list(own)].sum() for own in spaced if len(own) == count)
    assert choose_planes(np.ones(8), 8) == RotaryPlanes(0, 1, 8, 8)


def test_the_rows_of_kept_neurons_are_refitted() -> None:
    z, down, p = normal((300, 9), seed=0) @ normal((9, 9), seed=1), normal((9, 5), seed=2), normal((40, 5), seed=3)
    kept, rows = choose_neurons(down, z.T @ z, p.T @ p, 6)
    assert len(kept) == len(set(kept.tolist())) == 6
    best = np.linalg.lstsq(z[:, kept], z @ down, rcond=None)[0]
    np.testing.assert_allclose(rows, best, atol=2e-2 * np.abs(best).max())  # the moments are damped


def test_neurons_that_repeat_others_are_removed() -> None:
    """Inputs of rank 5: five neurons carry all, whichever of the repeated ones stay."""
    z = normal((300, 5), seed=0)
    z, down = np.hstack([z, z[:, :3]]), normal((8, 4), seed=1)
    kept, rows = choose_neurons(down, z.T @ z, np.eye(4), 5)
    assert sorted(kept % 5) == [0, 1, 2, 3, 4]
    assert np.linalg.norm(z[:, kept] @ rows - z @ down) <= 1e-2 * np.linalg.norm(z @ down)


def test_all_neurons_stay_as_they_are() -> None:
    down = isometry(7, 3)
    kept, rows = choose_neurons(down, np.eye(7), np.eye(3), 7)
    np.testing.assert_array_equal(kept, np.arange(7))
    np.testing.assert_array_equal(rows, down)
