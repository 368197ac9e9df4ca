"""Trees of tensors, under the contract of all decompositions."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib
from tnlib.interop import quimb

TOLERANCES = [None, 1e-10, 1e-5, 1e-2, 0.3, 1.0]


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=7),
    dtype=st.sampled_from(oracles.DTYPES),
    rtol=st.sampled_from(TOLERANCES),
    cap=st.sampled_from([None, None, 1, 2, 3]),
    kind=st.sampled_from(["normal", "decaying", "zero", "ghz"]),
    power=st.sampled_from([0, 0, 200, -200]),
    seed=st.integers(0, 99),
)
def test_a_tree_of_any_tensor(shape, dtype, rtol, cap, kind, power, seed) -> None:
    if dtype.itemsize == 4 or dtype == np.complex64:
        power //= 4
    x = {
        "normal": lambda: oracles.normal(shape, dtype, seed),
        "decaying": lambda: oracles.hilbert(shape).astype(dtype),
        "zero": lambda: np.zeros(shape, dtype),
        "ghz": lambda: oracles.ghz(len(shape), 2, dtype),
    }[kind]() * dtype.type(2.0**power)
    with oracles.unchanged(x):
        fit, warned = oracles.quietly(lambda: quimb.tree(x, rtol=rtol, max_rank=cap))
    oracles.assert_warned(fit, warned)
    oracles.assert_fit(fit, x, rtol=rtol)
    assert max(fit.value.ranks) <= (cap or 10**9)
    if cap is None:
        assert fit.converged
    for tensor in fit.value.tn:
        if "ROOT" not in tensor.tags:
            oracles.assert_isometric(tensor.data)
    assert fit.value.norm() == pytest.approx(oracles.norm(fit.value.full()), rel=1e3 * oracles.eps(dtype), abs=1e-300)


def test_a_tree_has_the_ranks_of_its_cuts() -> None:
    x = oracles.random_train((2, 3, 2, 3, 2, 2), (1, 2, 3, 2, 3, 2, 1))
    fit = quimb.tree(x, rtol=1e-12)
    tn = fit.value.tn
    for k, leg in enumerate(x.shape):
        unfolded = np.moveaxis(x, k, 0).reshape(leg, -1)
        assert tn.ind_size(f"bond0_{k}") == np.linalg.matrix_rank(unfolded, rtol=1e-9)
    for k in range(3):
        unfolded = np.moveaxis(x, (2 * k, 2 * k + 1), (0, 1)).reshape(x.shape[2 * k] * x.shape[2 * k + 1], -1)
        assert tn.ind_size(f"bond1_{k}") == np.linalg.matrix_rank(unfolded, rtol=1e-9)
    assert "Fit of Network, shape 2 x 3 x 2 x 3 x 2 x 2" in repr(fit)


def test_formats_become_trees_and_trees_are_gauged() -> None:
    tt = tnlib.TensorTrain(oracles.random_cores((2, 3, 2, 3, 2), (1, 2, 3, 3, 2, 1)))
    fit = quimb.tree(tt)
    oracles.assert_close(fit.value.full(), oracles.contract(tt), factor=1000)
    weights = quimb.gauge_loops(fit.value.tn).weights
    s = tnlib.schmidt_values(tt, 2) / tt.norm()
    np.testing.assert_allclose(weights["bond1_0"], s, atol=1e-13)


def test_trees_refuse_what_every_decomposition_refuses() -> None:
    with oracles.refused(ValueError, "tree", "rtol"):
        quimb.tree(np.ones((2, 2)), rtol=-1)
    with oracles.refused(ValueError, "tree", "finite"):
        quimb.tree(np.array([1.0, np.nan]))
