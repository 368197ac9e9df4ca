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
    adjoint_times,
    gram,
    gram_by_blas,
    gram_by_kernel,
    project,
    residual_norm,
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


SHAPES = [(1, 1, 1), (1, 5, 3), (1, 7, 100), (3, 4, 1), (40, 3, 7), (2, 16, 300), (300, 5, 2), (1, 66, 270)]


@pytest.mark.parametrize(("route", "dtype"), ROUTES, ids=str)
def test_gram_matrices(n_threads: int, route: str, dtype: np.dtype) -> None:
    for shape in SHAPES:
        a = oracles.normal(shape, dtype)
        with oracles.unchanged(a):
            g = (gram_by_blas if route == "BLAS" else gram_by_kernel)(a)
        assert g.dtype == (np.complex128 if dtype.kind == "c" else np.float64)
        oracles.assert_close(g, np.einsum("pik,pjk->ij", oracles.wide(a), oracles.wide(a).conj()), factor=16)
        oracles.assert_close(g, g.conj().T, factor=4)


@pytest.mark.parametrize(
    ("shape", "dtype", "by_kernel"),
    [
        ((1, 16, KERNEL_WORK // 256), np.float64, False),  # BLAS is as fast for one matrix in double precision
        ((64, 16, KERNEL_WORK // 2**14), np.float64, True),
        ((64, 20, KERNEL_WORK // 2**14), np.float64, False),
        ((1, 16, KERNEL_WORK // 256), np.float32, True),
        ((1, 16, KERNEL_WORK // 256), np.complex64, False),
    ],
)
def test_kernels_compute_what_they_are_faster_for(
    shape: tuple[int, ...], dtype: type, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tnlib.linalg.gram.gram_by_kernel", lambda _: "kernel")
    monkeypatch.setattr("tnlib.linalg.gram.gram_by_blas", lambda _: "BLAS")
    assert gram(np.empty(shape, dtype)) == ("kernel" if by_kernel else "BLAS")


@pytest.mark.parametrize(("route", "dtype"), ROUTES, ids=str)
def test_products_with_an_adjoint(n_threads: int, route: str, dtype: np.dtype) -> None:
    product = times_adjoint_by_blas if route == "BLAS" else times_adjoint_by_kernel
    wider = np.complex128 if dtype.kind == "c" else np.float64
    for m, l, n in ((1, 1, 1), (3, 2, 5), (4, 4, 16), (9, 5, 33), (130, 7, 20), (5, 9, 700), (3, 2, 5000)):
        a = oracles.normal((m, n), dtype)
        for b in (oracles.normal((l, n), dtype, seed=1), oracles.normal((l, n), wider, seed=1)):
            with oracles.unchanged(a, b):
                out = product(a, b)
            assert out.dtype == wider
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


# the last one is long enough for blocks
PROJECTED = [(1, 6, 50), (3, 6, 5), (9, 1, 4), (1, 8, 3), (1, 67, 1), (1, 150, 1030), (3, 8, 30_000)]


@oracles.each_dtype
def test_projections_and_their_errors(n_threads: int, dtype: np.dtype) -> None:
    for shape in PROJECTED:
        a = oracles.normal(shape, dtype)
        e = oracles.isometry(shape[1], min(3, shape[1]), dtype)
        want = np.matmul(e.conj().T, oracles.wide(a))
        with oracles.unchanged(a, e):
            products = adjoint_times(e, a)
            projected, discarded = project(e, a[0], negligible=0.0)
        assert products.dtype == want.dtype
        oracles.assert_close(products, want)
        oracles.assert_close(projected, want[0])
        gap = oracles.norm(oracles.wide(a[0]) - e @ want[0])
        assert discarded == pytest.approx(gap, rel=1e-6, abs=8 * EPS * oracles.norm(a[0]))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("part", [0.5, 1e-3, 1e-6, 1e-8, 1e-12, 1e-14, 0.0])
def test_the_discarded_norm_is_right_down_to_roundoff(dtype: type, part: float) -> None:
    """The difference of two squares has a floor at the root of eps; the result must not."""
    basis = oracles.isometry(40, 9, dtype)
    a = basis[:, :4] @ oracles.isometry(300, 4, dtype, seed=1).conj().T
    a += part * basis[:, 4:] @ oracles.isometry(300, 5, dtype, seed=2).conj().T
    projected, discarded = project(basis[:, :4], a, negligible=0.0)
    assert discarded == pytest.approx(part * np.sqrt(5), rel=0.02, abs=16 * EPS)
    assert discarded >= oracles.norm(a - basis[:, :4] @ projected) - 16 * EPS
    with_size = project(basis[:, :4], a, size=oracles.norm(a), negligible=0.0)[1]
    assert with_size == pytest.approx(discarded, rel=0.02, abs=1e-14)


def test_a_negligible_error_is_not_measured() -> None:
    a = oracles.isometry(40, 4) @ oracles.isometry(300, 4, seed=1).T
    assert project(oracles.isometry(40, 4), a, negligible=0.0)[1] < 16 * EPS
    assert 16 * EPS < project(oracles.isometry(40, 4), a, negligible=1e-4)[1] < 1e-5


@oracles.each_dtype
@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1), (50, 70)], ids=str)
def test_residuals_are_measured(dtype: np.dtype, shape: tuple[int, int]) -> None:
    a, left = oracles.normal(shape, dtype), oracles.normal((shape[0], 2), dtype, 1)
    right = oracles.normal((2, shape[1]), dtype, 2)
    want = oracles.norm(oracles.wide(a) - oracles.wide(left) @ oracles.wide(right))
    assert residual_norm(a, left, right) == pytest.approx(want, rel=64 * oracles.eps(dtype))
