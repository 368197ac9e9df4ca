"""Networks of other forms: trees made of tensors, PEPS and MERA made by quimb, our decompositions at work on them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from hypothesis import given
from hypothesis import strategies as st

import tnlib
from tnlib import network

TOLERANCES = [None, 1e-10, 1e-5, 1e-2, 0.3, 1.0]


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
        fit, warned = oracles.quietly(lambda: network.tree(x, rtol=rtol, max_rank=cap))
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
    fit = network.tree(x, rtol=1e-12)
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
    fit = network.tree(tt)
    oracles.assert_close(fit.value.full(), oracles.contract(tt), factor=1000)
    weights = network.gauge_loops(fit.value.tn).weights
    s = tnlib.schmidt_values(tt, 2) / tt.norm()
    np.testing.assert_allclose(weights["bond1_0"], s, atol=1e-13)


def test_trees_refuse_what_every_decomposition_refuses() -> None:
    with oracles.refused(ValueError, "tree", "rtol"):
        network.tree(np.ones((2, 2)), rtol=-1)
    with oracles.refused(ValueError, "tree", "finite"):
        network.tree(np.array([1.0, np.nan]))
    with oracles.refused(ValueError, "Network", "legs", "k0"):
        network.Network(qtn.MPS_ghz_state(3), legs=["k0", "k1"])
    with oracles.refused(TypeError, "Network", "tn"):
        network.Network(np.eye(2))


# -------------------------------------------------------------------------------------------------------- PEPS and MERA


def rows_of_norm(peps: Any) -> list[Any]:
    """<peps|peps> with one tensor per site, row by row: a train, TT-matrices, a train."""
    two = peps.H.reindex({i: f"{i}*" for i in peps.inner_inds()}) & peps
    for i in range(peps.Lx):
        for j in range(peps.Ly):
            two ^= peps.site_tag(i, j)
    two.fuse_multibonds_()
    return [two.select(peps.x_tag(i)) for i in range(peps.Lx)]


def bonds_between(one: Any, other: Any, columns: int) -> list[str]:
    """The indices from row to row, column by column."""
    pairs = [(one[f"Y{j}"], other[f"Y{j}"]) for j in range(columns)]
    return [next(i for i in a.inds if i in b.inds) for a, b in pairs]


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_boundary_contraction_of_a_peps_by_apply(dtype: str) -> None:
    peps = qtn.PEPS.rand(4, 4, bond_dim=2, seed=3, dtype=dtype)
    rows = rows_of_norm(peps)
    down = [bonds_between(a, b, 4) for a, b in itertools.pairwise(rows)]
    boundary = network.from_network(rows[0], tnlib.TensorTrain, names=down[0])
    errors = []
    for k in (1, 2):
        row = network.from_network(rows[k], tnlib.TTMatrix, names=[*down[k], *down[k - 1]])
        assert row.ranks == (1, 4, 4, 4, 1)
        fit = tnlib.apply(row, boundary, rtol=1e-8)
        boundary = fit.value
        errors.append(fit.error)
    last = network.from_network(rows[3], tnlib.TensorTrain, names=down[2])
    got = tnlib.inner(last.conj(), boundary)
    want = (peps.H & peps).contract(optimize="greedy")
    assert max(errors) <= 1e-8
    # each error is relative to what it truncates, which the rest of the network may enlarge
    assert abs(got - want) <= 1e-6 * abs(want)
    assert max(boundary.ranks) < 4**3  # compressed on the way


def test_our_splits_apply_to_the_tensors_of_a_peps() -> None:
    tensor = qtn.PEPS.rand(3, 3, bond_dim=3, seed=0)["I1,1"]
    bonds = [k for k, i in enumerate(tensor.inds) if i != "k1,1"]
    fit = tnlib.svd(tensor.data, left=(bonds[0], bonds[1]))
    split = network.to_network(fit.value, names=tensor.inds)
    oracles.assert_close(network.contract(split, legs=tensor.inds), tensor.data)
    assert network.is_isometry(split["U"], "bond")
    assert network.is_isometry(split["VH"], "bond")
    oracles.assert_fit(tnlib.tucker(tensor.data, ranks=2), tensor.data)


def test_a_mera_is_a_network_like_any_other() -> None:
    mera = qtn.MERA.rand(8, max_bond=2, seed=1)
    value = network.Network(mera, [f"k{k}" for k in range(8)])
    x = value.full()
    assert oracles.norm(x) == pytest.approx(1.0, rel=1e-12)  # isometries all the way up
    assert value.norm() == pytest.approx(1.0, rel=1e-12)
    tt = tnlib.tt_svd(x).value
    expected = [np.linalg.svd(x.reshape(2**k, -1), compute_uv=False) for k in range(1, 8)]
    for k, s in enumerate(expected, 1):
        got = tnlib.schmidt_values(tt, k)
        np.testing.assert_allclose(got, s[: len(got)], atol=1e-12)
    cost = network.contraction_cost(mera)
    assert cost.multiplications < cost.left_to_right.multiplications


def test_the_environment_of_a_peps_tensor_gives_the_norm_back() -> None:
    peps = qtn.PEPS.rand(3, 3, bond_dim=2, seed=5)
    bra = peps.H.reindex({i: f"{i}*" for i in peps.inner_inds()}).retag({t: f"{t}*" for t in peps.tags})
    centre = peps["I1,1"]
    gradient = network.derivative(bra & peps, "I1,1")
    want = (peps.H & peps).contract(optimize="greedy")
    assert np.tensordot(gradient, centre.data, centre.ndim) == pytest.approx(want, rel=1e-12)
