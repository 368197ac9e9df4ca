"""Gram matrices and thin products, by BLAS and by kernels, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import oracles
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st

from tnlib.linalg.gram import (
    KERNEL_WORK,
    gram,
    gram_by_blas,
    gram_by_kernel,
    times_adjoint,
    times_adjoint_by_blas,
    times_adjoint_by_kernel,
)

EPS = oracles.eps(np.float64)
REAL = [dtype for dtype in oracles.DTYPES if dtype.kind == "f"]  # complex products are left to BLAS
ROUTES = [("BLAS", dtype) for dtype in oracles.DTYPES] + [("kernel", dtype) for dtype in REAL]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threadpoolctl.threadpool_limits(request.param):
        yield request.param


def sum_of_products(a: np.ndarray) -> np.ndarray:
    return np.einsum("pik,pjk->ij", oracles.wide(a), oracles.wide(a).conj())


SHAPES = [(1, 1, 1), (1, 5, 3), (1, 7, 100), (3, 4, 1), (40, 3, 7), (2, 16, 300), (300, 5, 2), (1, 66, 270)]


@pytest.mark.parametrize(("route", "dtype"), ROUTES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gram_matrices(n_threads: int, route: str, dtype: np.dtype, shape: tuple[int, int, int]) -> None:
    a = oracles.normal(shape, dtype)
    with oracles.unchanged(a):
        g = (gram_by_blas if route == "BLAS" else gram_by_kernel)(a)
    assert g.dtype == (np.complex128 if dtype.kind == "c" else np.float64)
    oracles.assert_close(g, sum_of_products(a), factor=16)
    oracles.assert_close(g, g.conj().T, factor=4)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_both_sides_of_the_size_from_which_kernels_are_used(n_threads: int, dtype: np.dtype) -> None:
    for columns in (KERNEL_WORK // 256 - 1, KERNEL_WORK // 256 + 1):
        a = oracles.normal((1, 16, columns), dtype)
        oracles.assert_close(gram(a), sum_of_products(a), factor=256)
        b = oracles.normal((16, columns), dtype, seed=1)
        oracles.assert_close(times_adjoint(a[0], b), oracles.wide(a[0]) @ oracles.wide(b).conj().T, factor=256)


@pytest.mark.parametrize(("route", "dtype"), ROUTES, ids=str)
@pytest.mark.parametrize(("m", "l", "n"), [(1, 1, 1), (3, 2, 5), (4, 4, 16), (9, 5, 33), (130, 7, 20), (5, 9, 700)])
def test_products_with_an_adjoint(n_threads: int, route: str, dtype: np.dtype, m: int, l: int, n: int) -> None:
    a = oracles.normal((m, n), dtype)
    product = times_adjoint_by_blas if route == "BLAS" else times_adjoint_by_kernel
    for other in (dtype, np.complex128 if dtype.kind == "c" else np.float64):
        b = oracles.normal((l, n), other, seed=1)
        with oracles.unchanged(a, b):
            out = product(a, b)
        assert out.dtype == (np.complex128 if dtype.kind == "c" else np.float64)
        oracles.assert_close(out, oracles.wide(a) @ oracles.wide(b).conj().T, factor=16)


@given(
    p=st.integers(1, 6), m=st.integers(1, 9), n=st.integers(1, 60), dtype=st.sampled_from(oracles.DTYPES),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_gram_matrices_are_never_indefinite_by_more_than_roundoff(
    p: int, m: int, n: int, dtype: np.dtype, seed: int
) -> None:
    a = oracles.normal((p, m, n), dtype, seed)
    a[:, m // 2] = a[:, 0]
    values = np.linalg.eigvalsh(gram(a))
    assert values[0] >= -8 * EPS * values[-1]
