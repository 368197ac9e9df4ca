"""Belief propagation: exact marginals and partition functions on trees, the Bethe approximation with loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from hypothesis import given
from hypothesis import strategies as st

import tnlib
from tnlib.interop.quimb import contract, propagate_beliefs


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


@given(st.integers(2, 6), st.integers(0, 99))
def test_squared_moduli_of_a_product_are_a_model_of_its_own(n: int, seed: int) -> None:
    vectors = [oracles.normal((3,), np.complex128, seed + k) for k in range(n)]
    tn = qtn.TensorNetwork([qtn.Tensor(np.abs(v) ** 2, [f"k{k}"]) for k, v in enumerate(vectors)])
    found = propagate_beliefs(tn)
    for k, v in enumerate(vectors):
        np.testing.assert_allclose(found.marginals[f"k{k}"], np.abs(v) ** 2 / np.linalg.norm(v) ** 2, atol=1e-12)
    frequencies = (tnlib.sample(tnlib.product_state(vectors), 4000, rng=seed) == 0).mean(axis=0)
    assert np.abs(frequencies - [found.marginals[f"k{k}"][0] for k in range(n)]).max() < 0.05


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


def test_wrong_input_is_refused() -> None:
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
