"""gauge_loops: the value stays, weights are Schmidt values on trees, messages those of belief propagation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from quimb.tensor.belief_propagation import D2BP

import tnlib
from tnlib.interop import quimb

LOOPY = {
    "PEPS": lambda: qtn.PEPS.rand(3, 3, 3, seed=1),
    "complex PEPS": lambda: qtn.PEPS.rand(2, 3, 2, seed=2, dtype="complex128"),
    "single precision": lambda: qtn.PEPS.rand(2, 3, 3, seed=3, dtype="float32"),
    "ring": lambda: qtn.MPS_rand_state(6, 4, cyclic=True, seed=4),
    "regular graph": lambda: qtn.TN_rand_reg(8, 3, 3, phys_dim=2, seed=5),
    "MERA": lambda: qtn.MERA.rand(8, max_bond=3, seed=7),
}


def value(tn: Any) -> np.ndarray:
    legs = sorted(tn.outer_inds())
    return quimb.contract(tn, legs=legs)


def tree(sizes: dict[str, int], tensors: list[str], dtype: Any = np.float64) -> Any:
    """A network of normal tensors with one letter per index."""
    arrays = [oracles.normal([sizes[i] for i in inds], dtype, seed=k) for k, inds in enumerate(tensors)]
    return qtn.TensorNetwork([qtn.Tensor(a, list(inds)) for a, inds in zip(arrays, tensors, strict=True)])


@pytest.mark.parametrize("case", LOOPY)
def test_the_value_stays_and_the_messages_are_at_their_fixed_point(case: str) -> None:
    tn = LOOPY[case]()
    eps = oracles.eps(next(iter(tn)).dtype)
    before = value(tn)
    gauged = quimb.gauge_loops(tn)
    assert gauged.converged
    assert gauged.error <= 1000 * eps
    distance = oracles.norm(oracles.wide(value(gauged.network)) - oracles.wide(before))
    assert distance <= 2000 * eps * oracles.norm(before)
    np.testing.assert_array_equal(value(tn), before)
    assert set(gauged.weights) == set(gauged.network.inner_inds())
    for s in gauged.weights.values():
        assert np.linalg.norm(s) == pytest.approx(1, rel=100 * eps)
        assert (s > 0).all()
        assert (np.diff(s) <= 0).all()
    again = quimb.gauge_loops(gauged.network)
    for index, s in gauged.weights.items():
        np.testing.assert_allclose(again.weights[index], s, atol=1e4 * eps)


@pytest.mark.parametrize("case", ["PEPS", "complex PEPS", "ring", "regular graph"])
def test_the_weights_are_those_of_another_belief_propagation(case: str) -> None:
    r"""Whatever the gauge, the two messages on a bond multiply to a matrix with eigenvalues weights^2."""
    tn = LOOPY[case]()
    messages = D2BP(tn, optimize="greedy")
    messages.run(tol=1e-13, max_iterations=2000)
    gauged = quimb.gauge_loops(tn)
    for index, s in gauged.weights.items():
        one, two = (messages.messages[index, tid] for tid in tn.ind_map[index])
        squares = np.sort(np.linalg.eigvals(one @ two.T).real)[::-1]
        np.testing.assert_allclose(squares / squares.sum(), s**2, atol=1e-8)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_on_a_chain_it_is_the_vidal_form(dtype: Any) -> None:
    tt = tnlib.TensorTrain(oracles.random_cores((3, 4, 2, 3, 3), (1, 3, 5, 6, 3, 1), dtype))
    vidal = tnlib.vidal(tt)
    gauged = quimb.gauge_loops(quimb.to_network(tt))
    eps = oracles.eps(dtype)
    for k, s in enumerate(vidal.lambdas, 1):
        assert gauged.weights[f"bond{k}"].dtype == s.dtype
        np.testing.assert_allclose(gauged.weights[f"bond{k}"], s, atol=200 * eps)
    assert gauged.n_iter <= 5
    oracles.assert_close(value(gauged.network), oracles.contract(tt), dtype, factor=1000)


def test_on_a_tree_they_are_the_schmidt_values_of_every_bond() -> None:
    sizes = dict(zip("abcdefxyzw", (2, 3, 2, 2, 3, 2, 4, 3, 2, 5), strict=True))
    tn = tree(sizes, ["abx", "cdy", "xyzw", "ez", "fw"])
    legs = "abcdef"
    full = quimb.contract(tn, legs=list(legs))
    gauged = quimb.gauge_loops(tn)
    for bond, side in {"x": "ab", "y": "cd", "z": "e", "w": "f"}.items():
        rows = np.moveaxis(full, [legs.index(i) for i in side], range(len(side)))
        s = np.linalg.svd(rows.reshape(np.prod([sizes[i] for i in side]), -1), compute_uv=False)
        rank = len(gauged.weights[bond])
        np.testing.assert_allclose(gauged.weights[bond], s[:rank] / np.linalg.norm(s), atol=1e-13)
        assert np.linalg.norm(s[rank:]) <= 1e-13 * np.linalg.norm(s)


def test_bonds_lose_what_no_one_needs() -> None:
    tt = tnlib.tt_svd(oracles.random_train((3, 3, 3, 3), (1, 2, 3, 2, 1))).value
    twice = tt + tt
    assert twice.ranks == (1, 4, 6, 4, 1)
    gauged = quimb.gauge_loops(quimb.to_network(twice))
    assert [len(gauged.weights[f"bond{k}"]) for k in (1, 2, 3)] == [2, 3, 2]
    oracles.assert_close(value(gauged.network), 2 * tt.full(), factor=1000)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bonds_with_empty_directions_shrink_around_loops_too(dtype: str) -> None:
    tn = qtn.PEPS.rand(3, 3, 2, seed=8, dtype=dtype)
    want = quimb.gauge_loops(tn).weights
    padded = tn.copy()
    padded.expand_bond_dimension_(5, rand_strength=0.0)
    assert max(padded.ind_size(i) for i in padded.inner_inds()) == 5
    gauged = quimb.gauge_loops(padded)
    eps = oracles.eps(dtype)
    for index, s in want.items():
        np.testing.assert_allclose(gauged.weights[index], s, atol=1e4 * eps)
    oracles.assert_close(value(gauged.network), value(tn), dtype, factor=2000)


def test_any_scale() -> None:
    tn = LOOPY["complex PEPS"]()
    want = quimb.gauge_loops(tn)
    for power in (-600, 600):
        scaled = tn.copy()
        for tensor in itertools.islice(scaled, 3):
            tensor.modify(data=np.ldexp(tensor.data.real, power) + 1j * np.ldexp(tensor.data.imag, power))
        got = quimb.gauge_loops(scaled)
        for index, s in want.weights.items():
            np.testing.assert_allclose(got.weights[index], s, atol=1e-12)
        got.network.exponent -= 3 * power * np.log10(2)
        oracles.assert_close(value(got.network), value(tn), factor=1e5)


def test_odd_networks() -> None:
    alone = quimb.gauge_loops(tree({"a": 2, "b": 3}, ["ab"]))
    assert alone.converged
    assert alone.weights == {}
    sizes = dict.fromkeys("abxcdywz", 3)
    apart = tree(sizes, ["ax", "xb", "cyw", "ywd", "z"])
    gauged = quimb.gauge_loops(apart)
    assert len(gauged.weights) == 2  # y and w become one
    oracles.assert_close(value(gauged.network), value(apart), factor=1000)
    mixed = apart.copy()
    next(iter(mixed)).modify(data=oracles.normal((3, 3), np.complex64))
    gauged = quimb.gauge_loops(mixed)
    assert {str(tensor.dtype) for tensor in gauged.network} == {"complex128"}
    oracles.assert_close(value(gauged.network), value(mixed), factor=1000)
    zero = apart.copy()
    next(iter(zero)).modify(data=np.zeros((3, 3)))
    gauged = quimb.gauge_loops(zero)
    assert gauged.converged
    assert not value(gauged.network).any()
    pair = qtn.Tensor([[1.0, 0.0]], ["a", "x"]) & qtn.Tensor([[0.0], [1.0]], ["x", "b"])
    assert not value(quimb.gauge_loops(pair).network).any()
    assert quimb.gauge_loops(pair).converged


def test_running_out_of_sweeps_is_said() -> None:
    tn = LOOPY["PEPS"]()
    with pytest.warns(tnlib.ConvergenceWarning, match="gauge_loops: the messages miss the fixed point"):
        gauged = quimb.gauge_loops(tn, n_iter=2)
    assert not gauged.converged
    assert gauged.n_iter == 2
    oracles.assert_close(value(gauged.network), value(tn), factor=2000)
    loose = quimb.gauge_loops(tn, tol=1e-3)
    assert loose.converged
    assert loose.n_iter < quimb.gauge_loops(tn).n_iter


def test_bad_input() -> None:
    cp = quimb.to_network(tnlib.CP(np.ones(2), [np.ones((3, 2))] * 3))
    with oracles.refused(ValueError, "gauge_loops", "bond", "4", "spell_out"):
        quimb.gauge_loops(cp)
    spelled = quimb.spell_out(cp)
    oracles.assert_close(value(quimb.gauge_loops(spelled).network), value(cp), factor=1000)
    with oracles.refused(ValueError, "gauge_loops", "open indices"):
        quimb.gauge_loops(qtn.TN2D_classical_ising_partition_function(3, 4, 0.44))
    with oracles.refused(TypeError, "gauge_loops", "tn"):
        quimb.gauge_loops([np.ones(3)])
    with oracles.refused(ValueError, "gauge_loops", "tol"):
        quimb.gauge_loops(spelled, tol=-1.0)
    with oracles.refused(TypeError, "gauge_loops", "tol"):
        quimb.gauge_loops(spelled, tol="1e-3")
    with oracles.refused(ValueError, "gauge_loops", "n_iter"):
        quimb.gauge_loops(spelled, n_iter=0)
