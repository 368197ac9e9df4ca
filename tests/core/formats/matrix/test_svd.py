"""svd: smallest rank, optimal error, gauge, legs, degenerate and deficient input, drivers."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import oracles
import pytest
import scipy.linalg

import tnlib
from tnlib.linalg.thin_svd import thin_svd


@oracles.each_dtype
@pytest.mark.parametrize("shape", [(20, 12), (12, 20), (15, 15), (40, 1), (1, 40), (1, 1)], ids=str)
def test_exact_without_a_tolerance(dtype: np.dtype, shape: tuple[int, int]) -> None:
    a = oracles.normal(shape, dtype)
    fit = tnlib.svd(a)
    oracles.assert_fit(fit, a)
    oracles.assert_gauge(fit.value)
    oracles.assert_close(fit.value.full(), a, dtype)
    u, s, vh = fit.value
    np.testing.assert_allclose(s, np.linalg.svd(oracles.wide(a), compute_uv=False), atol=64 * oracles.eps(dtype) * s[0])
    assert (u.dtype, s.dtype, vh.dtype) == (dtype, np.zeros(0, dtype).real.dtype, dtype)
    assert fit.converged
    assert fit.n_iter == 0


@oracles.each_dtype
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_numerical_rank_is_found(dtype: np.dtype, rank: int) -> None:
    a = oracles.with_spectrum(np.linspace(1, 0.1, rank), 30, 20, dtype, seed=rank)
    assert tnlib.svd(a).value.ranks == (rank,)


@pytest.mark.parametrize("spectrum", oracles.SPECTRA)
def test_rank_is_the_smallest_and_the_error_optimal(spectrum: str) -> None:
    s = np.sort(oracles.SPECTRA[spectrum](20))[::-1]
    a = oracles.with_spectrum(s, 30, 20)
    optimal = np.sqrt(np.cumsum(s[::-1] ** 2)[::-1]) / np.linalg.norm(s)  # of rank 0, 1, ...
    for rtol in (1e-10, 1e-7, 3e-4, 0.02, 0.2, 0.8):
        fit = tnlib.svd(a, rtol=rtol)
        (rank,) = fit.value.ranks
        assert rank == 1 or optimal[rank - 1] > rtol * (1 - 1e-6), "a smaller rank would do"
        oracles.assert_fit(fit, a, rtol=rtol)
        best = optimal[rank] if rank < len(s) else 0.0
        assert fit.error == pytest.approx(best, rel=1e-4, abs=1e-14)


def test_the_tolerance_is_met_with_equality_at_an_edge() -> None:
    a = np.diag([4.0, 3.0])
    assert tnlib.svd(a, rtol=0.6).value.ranks == (1,)
    assert tnlib.svd(a, rtol=0.6 * (1 - 1e-12)).value.ranks == (2,)
    assert tnlib.svd(a, rtol=1.0).value.ranks == (1,)


def test_tails_are_sums_and_not_single_values() -> None:
    a = np.diag([10.0, *[1.0] * 9])  # every value is under the tolerance, their tail is not
    fit = tnlib.svd(a, rtol=0.2)
    assert fit.value.ranks == (6,)
    assert fit.error == pytest.approx(2 / np.sqrt(109))


@oracles.each_dtype
def test_error_has_no_floor_at_the_root_of_eps(dtype: np.dtype) -> None:
    e = oracles.eps(dtype)
    for small in (1e4 * e, 1e5 * e):
        a = oracles.with_spectrum([1.0, small], 12, 12, dtype)
        fit = tnlib.svd(a, max_rank=1)
        oracles.assert_fit(fit, a)
        assert fit.error == pytest.approx(small, rel=0.05)


@pytest.mark.parametrize("left", [0, 1, 2, 3, -1, (0, 1), (2, 0), (3, 1), (0, 1, 2), (3, 2, 1), (-4, 2), [1, 3]])
@pytest.mark.parametrize("dtype", [np.float64, np.complex64], ids=str)
def test_any_legs_can_be_the_rows(left: int | tuple[int, ...], dtype: type) -> None:
    x = oracles.normal((2, 3, 4, 5), dtype)
    fit = tnlib.svd(x, left=left)
    rows = tuple(k % 4 for k in ([left] if isinstance(left, int) else left))
    columns = [k for k in range(4) if k not in rows]
    assert fit.value.left == rows
    assert fit.value.u.shape[:-1] == tuple(x.shape[k] for k in rows)
    assert fit.value.vh.shape[1:] == tuple(x.shape[k] for k in columns)
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    oracles.assert_close(fit.value.full(), x, dtype)
    matrix = x.transpose(*rows, *columns).reshape(math.prod(fit.value.u.shape[:-1]), -1)
    np.testing.assert_allclose(fit.value.s, np.linalg.svd(matrix, compute_uv=False), rtol=1000 * oracles.eps(dtype))


@pytest.mark.parametrize(
    ("left", "kind"),
    [
        *(((), ValueError), ((0, 1, 2), ValueError), ((0, 0), ValueError), ((0, -3), ValueError), (3, ValueError)),
        *((-4, ValueError), ("0", TypeError), (0.0, TypeError), ((0, None), TypeError), (True, TypeError)),
    ],
)
def test_impossible_legs_are_refused(left: object, kind: type[Exception]) -> None:
    with oracles.refused(kind, "svd: left must", "got"):
        tnlib.svd(np.ones((2, 3, 4)), left=left)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4)])
def test_a_tensor_needs_left(shape: tuple[int, ...]) -> None:
    with oracles.refused(ValueError, "svd: a must be a matrix unless left=", str(shape)):
        tnlib.svd(np.ones(shape))


def test_a_cap_beside_equal_values_is_not_reported() -> None:
    a = np.diag([3.0, 3.0, 1.0, 1.0, 1e-18, 1e-18])
    for cap in (2, 4, 5, 6):
        assert tnlib.svd(a, max_rank=cap).notes == ()


def test_a_cut_that_the_tolerance_chose_is_not_blamed_on_the_cap() -> None:
    assert tnlib.svd(np.eye(4), rtol=0.8, max_rank=2).notes == ()


@oracles.each_dtype
def test_signs_are_fixed_where_entries_tie(dtype: np.dtype) -> None:
    u = scipy.linalg.hadamard(4) / 2 * np.array([-1, 1, -1, 1])
    v = oracles.isometry(9, 4, dtype, seed=3)
    a = ((u * [4, 3, 2, 1]) @ v.conj().T).astype(dtype)
    reference = tnlib.svd(a).value
    oracles.assert_signs(reference.u)
    assert (reference.u[0].real > 0).all(), "all entries tie, so the first one leads"
    for seed in range(20):
        noise = 4 * oracles.eps(dtype) * oracles.normal(a.shape, dtype, seed)
        moved = tnlib.svd((a + noise).astype(dtype)).value
        np.testing.assert_allclose(moved.u, reference.u, atol=500 * oracles.eps(dtype))
        np.testing.assert_allclose(moved.vh, reference.vh, atol=500 * oracles.eps(dtype))


@oracles.each_dtype
def test_signs_do_not_depend_on_the_sign_of_the_input(dtype: np.dtype) -> None:
    a = oracles.normal((7, 5), dtype)
    phase = dtype.type(np.exp(0.7j)) if dtype.kind == "c" else dtype.type(-1)
    plus, turned = tnlib.svd(a).value, tnlib.svd(phase * a).value
    oracles.assert_close(turned.u, plus.u, dtype, factor=500)
    oracles.assert_close(turned.vh, phase * plus.vh, dtype, factor=500)


def test_the_long_side_costs_memory_once() -> None:
    """Full matrices of singular vectors would take 98 MB for a matrix of 0.45 MB."""
    a = oracles.normal((16, 3500))
    tnlib.svd(a[:, :20])  # what the first call imports is no memory of the second
    tracemalloc.start()
    fit = tnlib.svd(a, rtol=1e-3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert fit.value.vh.shape == (16, 3500)
    assert peak < 12 * a.nbytes


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_where_divide_and_conquer_fails_the_qr_iteration_takes_over(
    monkeypatch: pytest.MonkeyPatch, order: str, shape: tuple[int, int]
) -> None:
    used: list[str] = []
    real = scipy.linalg.svd

    def stubborn(*args, **kwargs):
        used.append("gesdd")
        raise np.linalg.LinAlgError("SVD did not converge")

    def patient(*args, lapack_driver: str, **kwargs):
        used.append(lapack_driver)
        return real(*args, lapack_driver=lapack_driver, **kwargs)

    monkeypatch.setattr(np.linalg, "svd", stubborn)
    monkeypatch.setattr(scipy.linalg, "svd", patient)
    a = np.asarray(oracles.normal(shape, np.complex128), order=order)
    u, s, vh = thin_svd(a)
    assert used == ["gesdd", "gesvd"]
    oracles.assert_close((u * s) @ vh, a)
    oracles.assert_fit(tnlib.svd(a), a)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_small_values_that_are_near_each_other_by_chance_are_not_mixed(dtype: type) -> None:
    """Only equal values are rotated into each other: of others, what is beside the diagonal would be lost."""
    i = np.arange(256.0)
    x = (1 / (1 + i[:, None] + i) + 1e-6 * oracles.normal((256, 256), np.dtype(dtype), seed=0)).astype(dtype)
    fit = tnlib.svd(x, rtol=1e-9)
    assert oracles.true_error(x, fit.value) <= fit.error + 16 * oracles.eps(dtype)
