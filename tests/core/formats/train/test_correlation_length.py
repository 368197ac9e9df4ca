"""Correlation lengths that are known, and those of large, close and nilpotent spectra."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
from slow_cases import mostly_slow

import tnlib


def aklt() -> np.ndarray:
    plus, minus = np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 0.0]])
    middle = np.diag([1.0, -1.0])
    return np.stack([math.sqrt(2 / 3) * plus, -math.sqrt(1 / 3) * middle, -math.sqrt(2 / 3) * minus], axis=1)


def test_correlation_lengths_that_are_known() -> None:
    assert tnlib.correlation_length(aklt()) == pytest.approx(1 / math.log(3), rel=1e-12)
    assert tnlib.correlation_length(1e200 * aklt()) == pytest.approx(1 / math.log(3), rel=1e-12)
    assert tnlib.correlation_length(np.ones((1, 4, 1))) == 0.0
    ghz = np.zeros((2, 2, 2))
    ghz[[0, 1], [0, 1], [0, 1]] = 1
    assert tnlib.correlation_length(ghz) == math.inf


@pytest.mark.parametrize("gap", [1e-1, 1e-4, 1e-8, 1e-10])
def test_correlation_lengths_of_diagonal_cores(gap: float) -> None:
    """The transfer matrix of the core diag(1, 1 - gap) has eigenvalues 1 and 1 - gap."""
    core = np.diag([1.0, 1.0 - gap])[:, None]
    assert tnlib.correlation_length(core) == pytest.approx(-1 / np.log1p(-gap), rel=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_correlation_length_of_a_large_bond_and_in_another_gauge(dtype: Any) -> None:
    small = oracles.normal((6, 3, 6), dtype)
    turn = oracles.normal((6, 6), dtype, seed=5)
    turned = np.einsum("ab,bnc,cd->and", turn, small, np.linalg.inv(turn))
    length = tnlib.correlation_length(small)
    assert tnlib.correlation_length(turned) == pytest.approx(length, rel=1e-8)
    # beside a block whose eigenvalues are smaller, the same two lead; now by iteration
    large = np.zeros((40, 3, 40), dtype)
    large[:6, :, :6] = small
    large[6:, :, 6:] = 1e-3 * oracles.normal((34, 3, 34), dtype, seed=1)
    assert tnlib.correlation_length(large) == pytest.approx(length, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [28, 73])
def test_correlation_length_of_moduli_that_lie_close(seed: int) -> None:
    a = oracles.normal((33, 2, 33), np.complex128, seed)
    transfer = np.einsum("anb,cnd->acbd", a.conj(), a).reshape(33**2, -1)
    first, second = np.sort(np.abs(np.linalg.eigvals(transfer)))[:-3:-1]
    assert tnlib.correlation_length(a) == pytest.approx(-1 / np.log(second / first), rel=1e-8)


def test_correlation_length_of_zero_and_nilpotent_transfer_matrices() -> None:
    assert tnlib.correlation_length(np.zeros((3, 2, 3))) == tnlib.correlation_length(np.zeros((40, 2, 40))) == 0.0
    step = np.eye(40, k=1)[:, None]  # its powers vanish
    assert tnlib.correlation_length(step[:3, :, :3]) == 0.0
    assert tnlib.correlation_length(step) == 0.0


@pytest.mark.parametrize("dtype", mostly_slow([np.float64, np.complex128], [np.float64]))
@pytest.mark.parametrize("r", mostly_slow([2, 5, 16, 17, 24], [2, 16, 17]))  # dense up to 16
def test_correlation_lengths_are_those_of_the_dense_transfer_matrix(dtype: Any, r: int) -> None:
    a = oracles.normal((r, 3, r), dtype)
    transfer = np.einsum("anb,cnd->acbd", a, a.conj()).reshape(r * r, r * r)
    first, second = np.sort(np.abs(np.linalg.eigvals(transfer)))[:-3:-1]
    assert tnlib.correlation_length(a) == pytest.approx(-1 / np.log(second / first), rel=1e-9)
    assert tnlib.correlation_length(a) == tnlib.correlation_length(a)


@pytest.mark.slow
def test_many_equal_moduli_are_computed_or_refused() -> None:
    """An orthogonal matrix A gives A (x) A, whose eigenvalues all have modulus 1."""
    assert tnlib.correlation_length(oracles.isometry(20, 20)[:, None]) == math.inf
    with oracles.refused(ValueError, "correlation_length: core must have", "leading eigenvalue"):
        tnlib.correlation_length(oracles.isometry(40, 40)[:, None])
