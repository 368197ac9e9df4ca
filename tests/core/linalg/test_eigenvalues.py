"""Leading eigenvalue moduli of linear maps: dense, iterated, nilpotent, without convergence; gradients of radii."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import oracles
import pytest
import threadpoolctl

from tnlib.linalg.eigenvalues import leading_moduli


def transfer(core: np.ndarray) -> tuple[Callable[[np.ndarray], np.ndarray], int, np.dtype]:
    """The map x -> sum_n A_n x A_n^H of `core` (r, n, r), the dimension of its space, and its dtype."""
    r = len(core)

    def apply(x: np.ndarray) -> np.ndarray:
        return np.einsum("anb,bd,cnd->ac", core, x.reshape(r, r), core.conj(), optimize=True).reshape(-1)

    return apply, r * r, core.dtype


def dense_moduli(core: np.ndarray) -> np.ndarray:
    r = len(core)
    matrix = np.einsum("anb,cnd->acbd", core, core.conj()).reshape(r * r, r * r)
    return np.sort(np.abs(np.linalg.eigvals(matrix)))[::-1]


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("r", [1, 2, 5, 16, 17, 24])  # dense up to 16
def test_moduli_of_transfer_maps(dtype: type, r: int) -> None:
    core = oracles.normal((r, 3, r), dtype)
    want = dense_moduli(core)
    moduli = leading_moduli(*transfer(core), nilpotency_bound=r)
    assert moduli.shape == (2,)
    np.testing.assert_allclose(moduli[: len(want)], want[:2], rtol=1e-10)
    assert moduli[1] == (0 if r == 1 else moduli[1])
    np.testing.assert_allclose(leading_moduli(*transfer(core), count=1), want[:1], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [28, 73])
def test_moduli_that_are_close(seed: int) -> None:
    core = oracles.normal((33, 2, 33), np.complex128, seed)
    with threadpoolctl.threadpool_limits(1):  # of LAPACK, for the reference
        want = dense_moduli(core)[:2]
    np.testing.assert_allclose(leading_moduli(*transfer(core)), want, rtol=1e-9)


@pytest.mark.parametrize("r", [3, 16, 40, 100])
@pytest.mark.parametrize("kind", ["shift", "strictly triangular", "zero"])
def test_nilpotent_maps_have_moduli_zero(kind: str, r: int) -> None:
    core = {
        "shift": np.eye(r, k=1)[:, None],
        "strictly triangular": np.triu(oracles.normal((2, r, r)), 1).transpose(1, 0, 2),
        "zero": np.zeros((r, 2, r)),
    }[kind]
    start = time.perf_counter()
    np.testing.assert_array_equal(leading_moduli(*transfer(core), nilpotency_bound=r), 0)
    assert time.perf_counter() - start < 10


def test_maps_of_many_equal_moduli_are_computed_or_raise_soon() -> None:
    """An orthogonal matrix A gives A (x) A, whose eigenvalues all have modulus 1."""
    np.testing.assert_allclose(leading_moduli(*transfer(oracles.isometry(20, 20)[:, None])), 1, rtol=1e-10)
    start = time.perf_counter()
    with pytest.raises(np.linalg.LinAlgError):
        leading_moduli(*transfer(oracles.isometry(40, 40)[:, None]))
    assert time.perf_counter() - start < 20


def test_the_same_map_has_the_same_bits() -> None:
    core = oracles.normal((20, 2, 20))
    np.testing.assert_array_equal(leading_moduli(*transfer(core)), leading_moduli(*transfer(core)))
