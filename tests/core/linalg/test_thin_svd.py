"""Thin SVDs of matrices and of products, and the driver used where divide and conquer fails."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import scipy.linalg

import tnlib
from tnlib.linalg.thin_svd import product_svd, thin_svd

SHAPES = [(6, 4), (4, 6), (5, 5), (1, 3), (3, 1), (40, 2), (2, 40)]


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_thin_svds(dtype: np.dtype, shape: tuple[int, int]) -> None:
    a = oracles.normal(shape, dtype)
    for layout in (np.ascontiguousarray, np.asfortranarray):
        with oracles.unchanged(a):
            u, s, vh = thin_svd(layout(a))
        assert u.shape == (shape[0], min(shape))
        assert (u.dtype, vh.dtype) == (dtype, dtype)
        oracles.assert_isometric(u)
        oracles.assert_isometric(vh.conj().T)
        assert (np.diff(s) <= 0).all()
        oracles.assert_close((u * s) @ vh, a, dtype)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("m", "r", "n"), [(9, 3, 7), (3, 5, 4), (8, 1, 8), (2, 2, 30)])
def test_svds_of_products(dtype: np.dtype, m: int, r: int, n: int) -> None:
    left, right = oracles.normal((m, r), dtype), oracles.normal((r, n), dtype, seed=1)
    with oracles.unchanged(left, right):
        u, s, vh = product_svd(left, right)
    oracles.assert_isometric(u)
    oracles.assert_isometric(vh.conj().T)
    oracles.assert_signs(u)
    oracles.assert_close((u * s) @ vh, oracles.wide(left) @ oracles.wide(right), dtype, 200)
    u, s, vh = product_svd(0 * left, right)
    assert not s.any()
    oracles.assert_isometric(u)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_the_qr_iteration_replaces_divide_and_conquer_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, order: str, shape: tuple[int, int]
) -> None:
    drivers: list[str] = []
    scipy_svd: Callable[..., tuple[np.ndarray, ...]] = scipy.linalg.svd

    def failing(*args: object, **kwargs: object) -> None:
        drivers.append("gesdd")
        raise np.linalg.LinAlgError("SVD did not converge")

    def recorded(*args: object, lapack_driver: str, **kwargs: object) -> tuple[np.ndarray, ...]:
        drivers.append(lapack_driver)
        return scipy_svd(*args, lapack_driver=lapack_driver, **kwargs)

    monkeypatch.setattr(np.linalg, "svd", failing)
    monkeypatch.setattr(scipy.linalg, "svd", recorded)
    a = np.asarray(oracles.normal(shape, np.complex128), order=order)
    u, s, vh = thin_svd(a)
    assert drivers == ["gesdd", "gesvd"]
    oracles.assert_close((u * s) @ vh, a)
    oracles.assert_fit(tnlib.svd(a), a)
