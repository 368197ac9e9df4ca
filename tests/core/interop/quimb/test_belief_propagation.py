"""The gauge of belief propagation, truncation in it, and marginals of graphical models."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from hypothesis import given, settings
from hypothesis import strategies as st
from quimb.tensor.belief_propagation import D2BP
from quimb_networks import build
from slow_cases import mostly_slow

import tnlib
from tnlib.interop import quimb
from tnlib.interop.quimb import contract, gauge_loops, propagate_beliefs, to_network, truncate_gauged

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


@pytest.mark.parametrize("case", mostly_slow(LOOPY, ["ring", "MERA"]))
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


@pytest.mark.parametrize("case", mostly_slow(["PEPS", "complex PEPS", "ring", "regular graph"], ["PEPS", "ring"]))
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


@oracles.each_dtype
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
    tn = build(["abx", "cdy", "xyzw", "ez", "fw"], sizes=sizes)
    legs = "abcdef"
    full = quimb.contract(tn, legs=list(legs))
    gauged = quimb.gauge_loops(tn)
    for bond, side in {"x": "ab", "y": "cd", "z": "e", "w": "f"}.items():
        rows = np.moveaxis(full, [legs.index(i) for i in side], range(len(side)))
        s = np.linalg.svd(rows.reshape(np.prod([sizes[i] for i in side]), -1), compute_uv=False)
        rank = len(gauged.weights[bond])
        np.testing.assert_allclose(gauged.weights[bond], s[:rank] / np.linalg.norm(s), atol=1e-13)
        assert np.linalg.norm(s[rank:]) <= 1e-13 * np.linalg.norm(s)


@pytest.mark.slow
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
    alone = quimb.gauge_loops(build(["ab"]))
    assert alone.converged
    assert alone.weights == {}
    sizes = dict.fromkeys("abxcdywz", 3)
    apart = build(["ax", "xb", "cyw", "ywd", "z"], sizes=sizes)
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
    with pytest.warns(tnlib.ConvergenceWarning, match="gauge_loops: the weights still change"):
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


def decaying(seed: int) -> Any:
    """A PEPS with decaying weights on every bond, in a random basis."""
    peps, rng = qtn.PEPS.rand(3, 3, bond_dim=4, seed=seed), np.random.default_rng(seed)
    for bond in peps.inner_inds():
        a, b = (peps.tensor_map[number] for number in peps.ind_map[bond])
        change = rng.standard_normal((4, 4))
        a.gate_(np.diag(0.5 ** np.arange(4)) @ change, bond)
        b.gate_(np.linalg.inv(change).T, bond)
    return peps


def error_of(tn: Any, reference: Any) -> float:
    legs = reference.outer_inds()
    x = contract(reference, legs=legs)
    return float(np.linalg.norm(contract(tn, legs=legs) - x) / np.linalg.norm(x))


@pytest.mark.parametrize("seed", mostly_slow(range(6), range(2)))
def test_the_gauged_cut_is_more_accurate_with_loops(seed: int) -> None:
    peps = decaying(seed)
    fit = truncate_gauged(gauge_loops(peps), max_rank=2)
    assert set(fit.value.ranks) == {2}
    assert not fit.certified
    error = error_of(fit.value.tn, peps)
    assert error < error_of(peps.compress_all(max_bond=2, canonize=False), peps)
    assert 0.5 * error <= fit.error <= 2 * error


def test_one_bond_of_a_chain_is_cut_optimally() -> None:
    tt = tnlib.tt_svd(oracles.random_train((4, 3, 5), (1, 2, 5, 1))).value
    gauged = gauge_loops(to_network(tt))
    fit = truncate_gauged(gauged, max_rank=3)
    best = tnlib.truncate_bond(tt, 2, max_rank=3)
    assert fit.error == pytest.approx(best.error, rel=1e-6)
    assert error_of(fit.value.tn, gauged.network) == pytest.approx(best.error, rel=1e-6)


def test_ranks_follow_the_tolerance() -> None:
    gauged = gauge_loops(decaying(0))
    fits = [truncate_gauged(gauged, rtol=rtol) for rtol in (0.5, 0.1, 1e-3)]
    assert [fit.error <= rtol for fit, rtol in zip(fits, (0.5, 0.1, 1e-3), strict=True)] == [True] * 3
    assert np.all(np.diff([sum(fit.value.ranks) for fit in fits]) > 0)
    whole = truncate_gauged(gauged)
    assert error_of(whole.value.tn, gauged.network) <= 1e-12


def test_wrong_input_is_refused() -> None:
    with oracles.refused(TypeError, "truncate_gauged: gauged must be the result of gauge_loops"):
        truncate_gauged(decaying(0))
    with oracles.refused(TypeError, "truncate_gauged: keywords", "max_rank="):
        truncate_gauged(gauge_loops(decaying(0)), max_bond=2)  # type: ignore[call-arg]


def factor_tree(n: int, seed: int) -> Any:
    """A random tree of variables v0 ... with factors on vertices and edges, and one factor of three variables."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, n)
    tensors = [qtn.Tensor(rng.random(sizes[k]) + 0.05, [f"v{k}"]) for k in range(n) if rng.random() < 0.7]
    for k in range(1, n):
        parent = int(rng.integers(0, k))
        tensors.append(qtn.Tensor(rng.random((sizes[parent], sizes[k])) ** 3 + 0.01, [f"v{parent}", f"v{k}"]))
    tensors.append(qtn.Tensor(rng.random((sizes[0], 2, 2)), ["v0", "x", "y"]))
    return qtn.TensorNetwork(tensors)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(1, 7), st.integers(0, 999))
def test_trees_are_exact(n: int, seed: int) -> None:
    tn = factor_tree(n, seed)
    found = propagate_beliefs(tn)
    z = float(contract(tn, legs=[]))
    assert found.converged
    assert found.log_partition == pytest.approx(np.log(z), abs=1e-10)
    assert set(found.marginals) == set(tn.ind_map)
    for index, p in found.marginals.items():
        np.testing.assert_allclose(p, contract(tn, legs=[index]) / z, atol=1e-10)


def test_a_repeated_index_is_a_diagonal() -> None:
    found = propagate_beliefs(qtn.TensorNetwork([qtn.Tensor(np.array([[1.0, 3.0], [2.0, 5.0]]), "aa")]))
    assert found.log_partition == pytest.approx(np.log(6), abs=1e-12)
    np.testing.assert_allclose(found.marginals["a"], [1 / 6, 5 / 6], atol=1e-12)


def test_the_input_is_not_changed() -> None:
    tn = factor_tree(4, 1)
    before = [tensor.data.copy() for tensor in tn]
    propagate_beliefs(tn)
    assert all(np.array_equal(tensor.data, x) for tensor, x in zip(tn, before, strict=True))


def test_observed_values_are_factors_with_zeros() -> None:
    tn = factor_tree(6, 3)
    value = max(tn.ind_map, key=tn.ind_size)
    seen = np.zeros(tn.ind_size(value))
    seen[1] = 1
    observed = tn & qtn.Tensor(seen, [value])
    found = propagate_beliefs(observed)
    assert np.array_equal(found.marginals[value], seen)
    assert found.log_partition == pytest.approx(np.log(contract(observed, legs=[])), abs=1e-10)
    for index, p in found.marginals.items():
        joint = contract(observed, legs=[index])
        np.testing.assert_allclose(p, joint / joint.sum(), atol=1e-10)


def test_loops_are_approximated() -> None:
    errors = []
    for coupling in (0.05, 0.1, 0.2):
        grid = qtn.HTN2D_classical_ising_partition_function(4, 4, beta=coupling, h=0.1)
        exact = float(np.log(contract(grid, legs=[])))
        errors.append(abs(propagate_beliefs(grid).log_partition - exact))
    assert np.all(np.diff(errors) > 0)
    assert errors[0] < 1e-3


def test_scales_stay_out_of_the_way() -> None:
    tn = factor_tree(4, 0)
    large = tn.copy()
    for tensor in large:
        tensor.modify(data=tensor.data * 1e300)
    large.exponent = -5.0
    plain, scaled = propagate_beliefs(tn), propagate_beliefs(large)
    shift = tn.num_tensors * np.log(1e300) - 5 * np.log(10)
    assert scaled.log_partition == pytest.approx(plain.log_partition + shift, rel=1e-12)
    for index, p in plain.marginals.items():
        np.testing.assert_allclose(scaled.marginals[index], p, atol=1e-12)


def test_sweeps_that_run_out_are_reported() -> None:
    grid = qtn.HTN2D_classical_ising_partition_function(4, 4, beta=0.3, h=0.1)
    with pytest.warns(tnlib.ConvergenceWarning, match="still change by"):
        assert not propagate_beliefs(grid, n_iter=2).converged


def test_wrong_input_is_refused_of_beliefs() -> None:
    a = qtn.Tensor([1.0, 0.0], ["a"])
    with oracles.refused(ValueError, "propagate_beliefs: tn must hold real non-negative entries", "indices b"):
        propagate_beliefs(a & qtn.Tensor([1.0, -1.0], ["b"]))
    with oracles.refused(ValueError, "propagate_beliefs: tn must hold real non-negative entries"):
        propagate_beliefs(a & qtn.Tensor([1.0j, 1.0], ["b"]))
    with oracles.refused(ValueError, "some configuration must have a positive weight"):
        propagate_beliefs(a & qtn.Tensor([0.0, 1.0], ["a"]))
    with oracles.refused(ValueError, "tol must be positive and damping from 0 to below 1"):
        propagate_beliefs(a & a, damping=1.0)
    with oracles.refused(TypeError, "propagate_beliefs: tn must be a TensorNetwork"):
        propagate_beliefs(np.eye(2))
    with oracles.refused(
        TypeError, "propagate_beliefs: tn must be a TensorNetwork", "got a Tensor; pass tn.as_network()"
    ):
        propagate_beliefs(a)
    assert propagate_beliefs(a.as_network()).log_partition == pytest.approx(0, abs=1e-15)
