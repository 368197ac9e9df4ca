"""Gram matrices, thin products, projections, and the left singular vectors and bases of rows that are made of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracles
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st

from tnlib.linalg import threads
from tnlib.linalg.left import left_svd
from tnlib.linalg.project import adjoint_times, project, residual_norm
from tnlib.linalg.rows import row_basis

gram_module, project_module = (importlib.import_module(f"tnlib.linalg.{name}") for name in ("gram", "project"))
gram, times_adjoint = gram_module.gram, gram_module.times_adjoint
EPS = oracles.eps(np.float64)


@pytest.fixture(params=["BLAS", "kernels", "kernels on two threads"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test once with each of the ways in which long products are made."""
    for module in (gram_module, project_module):
        monkeypatch.setattr(module, "KERNEL_WORK", np.inf if request.param == "BLAS" else 0)
    monkeypatch.setattr(project_module, "_TALL", 8)
    if request.param == "kernels on two threads":
        monkeypatch.setattr(threads, "count", lambda: 2)
    with threadpoolctl.threadpool_limits(1):
        yield request.param


def sum_of_products(a: np.ndarray) -> np.ndarray:
    return np.einsum("pik,pjk->ij", oracles.wide(a), oracles.wide(a).conj())


SHAPES = [(1, 1, 1), (1, 5, 3), (1, 7, 100), (3, 4, 1), (40, 3, 7), (2, 16, 300), (300, 5, 2), (1, 66, 270)]


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gram_matrices(route: str, dtype: np.dtype, shape: tuple[int, int, int]) -> None:
    a = oracles.normal(shape, dtype)
    with oracles.unchanged(a):
        g = gram(a)
    assert g.dtype == (np.complex128 if dtype.kind == "c" else np.float64)
    oracles.assert_close(g, sum_of_products(a), factor=16)
    oracles.assert_close(g, g.conj().T, factor=4)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("m", "l", "n"), [(1, 1, 1), (3, 2, 5), (4, 4, 16), (9, 5, 33), (130, 7, 20), (5, 9, 700)])
def test_products_with_an_adjoint(route: str, dtype: np.dtype, m: int, l: int, n: int) -> None:
    a = oracles.normal((m, n), dtype)
    for other in (dtype, np.complex128 if dtype.kind == "c" else np.float64):
        b = oracles.normal((l, n), other, seed=1)
        with oracles.unchanged(a, b):
            got = times_adjoint(a, b)
        assert got.dtype == (np.complex128 if dtype.kind == "c" else np.float64)
        oracles.assert_close(got, oracles.wide(a) @ oracles.wide(b).conj().T, factor=16)


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


@pytest.mark.parametrize("shape", [(1, 6, 50), (3, 6, 5), (9, 1, 4), (1, 8, 3), (1, 67, 1), (1, 150, 1030)], ids=str)
@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_projections_and_what_they_lose(route: str, dtype: np.dtype, shape: tuple[int, int, int]) -> None:
    a = oracles.normal(shape, dtype)
    e = oracles.isometry(shape[1], min(3, shape[1]), dtype)
    want = np.einsum("ir,pik->prk", e.conj(), oracles.wide(a))
    with oracles.unchanged(a, e):
        got = adjoint_times(e, a)
        left, lost = project(e, a[0], negligible=0.0)
    assert got.dtype == want.dtype
    oracles.assert_close(got, want)
    oracles.assert_close(left, want[0])
    gap = oracles.norm(oracles.wide(a[0]) - e @ want[0])
    assert lost == pytest.approx(gap, rel=1e-6, abs=8 * EPS * oracles.norm(a[0]))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("part", [0.5, 1e-3, 1e-5, 1e-6, 1e-8, 1e-12, 1e-14, 0.0])
def test_what_a_projection_loses_is_known_down_to_roundoff(dtype: type, part: float) -> None:
    """The difference of two squares has a floor at the root of eps; the answer must not."""
    basis = oracles.isometry(40, 9, dtype)
    a = basis[:, :4] @ oracles.isometry(300, 4, dtype, seed=1).conj().T
    a += part * basis[:, 4:] @ oracles.isometry(300, 5, dtype, seed=2).conj().T
    left, lost = project(basis[:, :4], a, negligible=0.0)
    assert lost == pytest.approx(part * np.sqrt(5), rel=0.02, abs=16 * EPS)
    assert lost >= oracles.norm(a - basis[:, :4] @ left) - 16 * EPS
    assert project(basis[:, :4], a, size=oracles.norm(a), negligible=0.0)[1] == pytest.approx(lost, rel=0.02, abs=1e-14)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1), (50, 70)], ids=str)
def test_residuals_are_measured(dtype: np.dtype, shape: tuple[int, int]) -> None:
    a, left = oracles.normal(shape, dtype), oracles.normal((shape[0], 2), dtype, 1)
    right = oracles.normal((2, shape[1]), dtype, 2)
    want = oracles.norm(oracles.wide(a) - oracles.wide(left) @ oracles.wide(right))
    assert residual_norm(a, left, right) == pytest.approx(want, rel=64 * oracles.eps(dtype))


# ------------------------------------------------------------------------------------------- left singular vectors

# of m values; each has a part that a Gram matrix alone does not see
SPECTRA: dict[str, Callable[[int], np.ndarray]] = {
    "geometric to 1e-16": lambda m: 10.0 ** -np.linspace(0, 16, m),
    "geometric to 1e-40": lambda m: 10.0 ** -np.linspace(0, 40, m),
    "clusters": lambda m: 10.0 ** -(4.0 * (np.arange(m) * 5 // m)),
    "clusters of three": lambda m: 10.0 ** -(1.5 * (np.arange(m) // 3)),
    "exact cut": lambda m: np.where(np.arange(m) < m // 3, 1.0, 0.0),
    "cut at 1e-7": lambda m: np.where(np.arange(m) < m // 3, 1.0, 1e-7),
    "cut at 1e-9": lambda m: np.where(np.arange(m) < m // 3, 1.0, 1e-9),
    "one large": lambda m: np.where(np.arange(m) < 1, 1.0, 1e-8),
    "rank one": lambda m: np.where(np.arange(m) < 1, 1.0, 0.0),
    "flat": lambda m: np.ones(m),
}


def tails(s: np.ndarray) -> np.ndarray:
    return np.sqrt(np.append(np.cumsum(s[::-1] ** 2)[::-1], 0.0))


def singular_values(a: np.ndarray) -> np.ndarray:
    """Those of `a` (m, n), from triangles of short blocks: the QR of a long matrix rounds in one direction if all
    of its entries are equal, and is off by n eps.
    """
    blocks = [np.linalg.qr(a[:, k : k + 64].T, mode="r") for k in range(0, a.shape[1], 64)]
    while len(blocks) > 1:
        blocks = [np.linalg.qr(np.concatenate(blocks[k : k + 2]), mode="r") for k in range(0, len(blocks), 2)]
    return np.linalg.svd(blocks[0], compute_uv=False)


def assert_left(found: Any, a: np.ndarray, *, factor: float) -> None:
    """`found` holds left singular vectors and values of `a` (p, m, n) to `factor` eps of the norm, absolutely."""
    flat = oracles.wide(a).transpose(1, 0, 2).reshape(a.shape[1], -1)
    unit = factor * EPS * np.linalg.norm(flat)
    want = np.zeros(len(found.s))
    true = singular_values(flat)
    want[: len(true)] = true
    assert len(found.s) >= len(true)
    assert (np.diff(found.s) <= 0).all()
    assert (found.s >= 0).all()
    oracles.assert_isometric(found.u)
    np.testing.assert_allclose(found.s, want, rtol=0, atol=unit)
    rows = found.u.conj().T @ flat
    products = rows @ rows.conj().T  # rows[i] of length s[i], orthogonal to each other
    lengths = found.s + unit
    assert (np.abs(products - np.diag(found.s**2)) <= 4 * unit * (lengths[:, None] + lengths)).all()
    for r in range(0, len(true), max(1, len(true) // 16)):
        lost = np.linalg.norm(flat - found.u[:, :r] @ rows[:r])
        assert lost == pytest.approx(tails(want)[r], rel=1e-9, abs=4 * unit)


# complex products are BLAS's; and once is enough for the large one
EXACT = [
    *(
        ("BLAS", np.dtype(dtype), m, n)
        for dtype in ("float64", "complex128")
        for m, n in ((8, 1100), (40, 300), (200, 600))
    ),
    *(("kernels on two threads", np.dtype(np.float64), m, n) for m, n in ((8, 1100), (40, 300))),
]


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("route", "dtype", "m", "n"), EXACT, indirect=["route"], ids=str)
def test_exact_left_singular_vectors(route: str, spectrum: str, dtype: np.dtype, m: int, n: int) -> None:
    a = oracles.with_spectrum(SPECTRA[spectrum](m), m, n, dtype)[None]
    with oracles.unchanged(a):
        found = left_svd(a, exact=True)
    assert found.blur == 0
    # LAPACK's divide and conquer takes values for equal that differ by less than 64 eps
    assert_left(found, a, factor=160 if "clusters" in spectrum else 16)


def structured(m: int, n: int) -> dict[str, np.ndarray]:
    """Matrices whose rows lie in a space of few dimensions exactly, rounding errors and all."""
    rng = np.random.default_rng(0)
    half = np.zeros((m, n))
    half[: m // 2] = np.outer(rng.standard_normal(m // 2), rng.standard_normal(n))
    return {
        "ones": np.ones((m, n)),
        "zero but for half of the rows": half,
        "integers of rank one": np.outer(rng.integers(-5, 6, m), rng.integers(-5, 6, n)).astype(float),
        "integers of rank three": (rng.integers(-5, 6, (m, 3)) @ rng.integers(-5, 6, (3, n))).astype(float),
        "equal rows": np.repeat(rng.standard_normal((2, n)), -(-m // 2), axis=0)[:m],
        "equal columns": np.repeat(rng.standard_normal((m, 2)), n // 2, axis=1),
        "sums": np.add.outer(np.arange(m), np.arange(n)) + 0.0,
        "few columns": np.where(np.arange(n) < 3, rng.standard_normal((m, n)), 0.0),
        "diagonal": np.eye(m, n),
        "one entry": np.eye(m, n) * (np.arange(n) == 1),
    }


@pytest.mark.parametrize("kind", structured(4, 8))
@pytest.mark.parametrize(("m", "n"), [(4, 4096), (16, 1024), (100, 300)])
def test_exact_left_singular_vectors_of_exactly_low_rank(kind: str, m: int, n: int) -> None:
    """The directions of singular value zero hold rounding errors, which may be parallel to large rows."""
    a = structured(m, n)[kind][None]
    assert_left(left_svd(a, exact=True), a, factor=32)


@pytest.mark.parametrize("shape", [(12, 80), (60, 8), (16, 16)], ids=str)
def test_exact_left_singular_vectors_of_hilbert_tensors(shape: tuple[int, int]) -> None:
    a = oracles.hilbert((shape[0], shape[1], 40)).reshape(1, shape[0], -1)
    assert_left(left_svd(a, exact=True), a, factor=16)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 3, 2), (1, 1, 9000), (9000, 1, 1), (30, 4, 70), (700, 6, 3), (5, 40, 60)], ids=str
)
@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_left_singular_vectors_of_slabs(exact: bool, shape: tuple[int, int, int], dtype: np.dtype) -> None:
    a = oracles.normal(shape, dtype)
    with oracles.unchanged(a):
        found = left_svd(a, exact=exact)
    if found.u.dtype in (np.float64, np.complex128):
        flat = oracles.wide(a).transpose(1, 0, 2).reshape(shape[1], -1)
        np.testing.assert_allclose(
            found.s[: min(flat.shape)],
            np.linalg.svd(flat, compute_uv=False),
            rtol=1e-9,
            atol=0 if exact else found.blur,
        )
    oracles.assert_isometric(found.u)


BLURRED = [
    *(("BLAS", dtype, m, n) for dtype in oracles.DTYPES for m, n in ((3, 4), (40, 300))),
    ("BLAS", np.dtype(np.float64), 200, 600),
    *(("kernels on two threads", np.dtype(dtype), 40, 300) for dtype in ("float32", "float64")),
]


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("route", "dtype", "m", "n"), BLURRED, indirect=["route"], ids=str)
def test_tails_from_one_gram_matrix_are_right_to_their_blur(
    route: str, spectrum: str, dtype: np.dtype, m: int, n: int
) -> None:
    a = oracles.with_spectrum(SPECTRA[spectrum](m), m, n, dtype)
    found = left_svd(a[None], exact=False)
    assert 0 < found.blur < 1e-5 * oracles.norm(a)
    oracles.assert_isometric(found.u)
    true = tails(np.linalg.svd(oracles.wide(a), compute_uv=False))
    assert (np.abs(tails(found.s) ** 2 - true**2) <= found.blur**2).all()
    for r in range(0, m, max(1, m // 8)):  # what the vectors really leave, and not only what the values say
        left = found.u[:, :r]
        lost = oracles.norm(oracles.wide(a) - left @ (left.conj().T @ oracles.wide(a)))
        assert abs(lost**2 - tails(found.s)[r] ** 2) <= found.blur**2


def test_zero_has_no_blur() -> None:
    for exact in (False, True):
        found = left_svd(np.zeros((1, 4, 3000)), exact=exact)
        oracles.assert_isometric(found.u)
        assert not found.s.any()
        assert found.blur == 0


# ------------------------------------------------------------------------------------------------- bases of rows


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(3, 5), (20, 250), (40, 110), (12, 6), (64, 2048)])
def test_bases_of_rows(spectrum: str, dtype: np.dtype, m: int, n: int) -> None:
    a = oracles.with_spectrum(SPECTRA[spectrum](min(m, n)), m, n, dtype)
    with oracles.unchanged(a):
        l, q = row_basis(a)
    assert l.dtype == q.dtype == dtype
    assert l.shape == (m, len(q))
    assert len(q) <= min(m, n)
    oracles.assert_isometric(q.conj().T)
    oracles.assert_close(l @ q, a, dtype, factor=8 * np.sqrt(m) + 8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [2.0**-60, 2.0**-30, 1.0, 2.0**30, 2.0**60])
@pytest.mark.parametrize("spectrum", ["geometric to 1e-16", "cut at 1e-7", "flat"])
def test_bases_of_rows_at_any_size_that_a_sweep_may_leave(dtype: type, size: float, spectrum: str) -> None:
    """Sweeps over trains let the entries of what they carry grow to 2 ** 64 before they set a power of two aside."""
    a = (size * oracles.with_spectrum(SPECTRA[spectrum](20), 20, 250)).astype(dtype)
    l, q = row_basis(a)
    oracles.assert_isometric(q.conj().T)
    oracles.assert_close(l @ q, a, dtype)


def test_bases_of_zero_rows() -> None:
    for shape in ((3, 5), (20, 250)):
        l, q = row_basis(np.zeros(shape))
        oracles.assert_isometric(q.T)
        assert not l.any()
