"""Products along legs and with columns of factors."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

from tnlib.linalg.multilinear import (
    contract_columns,
    khatri_rao,
    leading_eigenvectors,
    mode_product,
    solve_damped,
    solve_gram,
    solve_tall,
    unfold,
)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_products_along_legs(dtype: type) -> None:
    x = oracles.normal((2, 3, 4, 5), dtype)
    m = {k: oracles.normal((6, n), dtype, k) for k, n in enumerate((2, 3, 4, 5))}
    for mode, subscripts in enumerate(("abcd,xa->xbcd", "abcd,xb->axcd", "abcd,xc->abxd", "abcd,xd->abcx")):
        oracles.assert_close(mode_product(x, m[mode], mode), np.einsum(subscripts, x, m[mode]))
        matrix = unfold(x, mode)
        assert matrix.shape == (x.shape[mode], x.size // x.shape[mode])
        np.testing.assert_array_equal(matrix[1], np.take(x, 1, axis=mode).ravel())


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (2, 3, 4, 5), (2, 1, 3, 2, 4)], ids=str)
def test_khatri_rao_and_contracted_columns(dtype: type, shape: tuple[int, ...]) -> None:
    factors = [oracles.normal((n, 3), dtype, k) for k, n in enumerate(shape)]
    oracles.assert_close(khatri_rao(factors[:2]), np.einsum("ir,jr->ijr", *factors[:2]).reshape(shape[0] * shape[1], 3))
    for mode in range(len(shape)):
        others = [f for k, f in enumerate(factors) if k != mode]
        columns = oracles.normal((*shape, 3), dtype, 9)
        flat = np.moveaxis(columns, mode, 0).reshape(shape[mode], -1, 3)
        expected = np.einsum("kir,ir->kr", flat, khatri_rao(others))
        oracles.assert_close(contract_columns(columns, factors, mode), expected, factor=200)


@pytest.mark.parametrize("rank", [1, 4, 9])  # of a 6 x 6 Gram matrix: singular, singular, regular
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_gram_systems_are_solved_or_pseudo_solved(dtype: type, rank: int) -> None:
    a, target = oracles.normal((rank, 6), dtype), oracles.normal((5, 6), dtype, 1)
    gram = a.conj().T @ a
    solved = solve_gram(target, gram)
    rcond = 6 * np.finfo(dtype).eps
    expected = target.astype(complex) @ np.linalg.pinv(gram.astype(complex), rcond=rcond, hermitian=True)
    assert solved.dtype == dtype
    assert np.linalg.norm(solved - expected) <= 1e3 * np.finfo(dtype).eps * np.linalg.cond(a) ** 2 * np.linalg.norm(
        expected
    )


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_tall_systems(dtype: type) -> None:
    a, b = oracles.normal((9, 4), dtype), oracles.normal((9, 3), dtype, 1)
    oracles.assert_close(solve_tall(a, b), np.linalg.lstsq(a, b, rcond=None)[0], dtype, 1000)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_damped_systems(dtype: type) -> None:
    a, right = oracles.normal((5, 5), dtype), oracles.normal((5,), dtype, 1)
    with oracles.unchanged(a, right):
        x = solve_damped(a, 0.5, right)
    oracles.assert_close((a + 0.5 * np.eye(5)) @ x, right, factor=1e4)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_leading_eigenvectors(dtype: type) -> None:
    u = oracles.isometry(6, 6, dtype)
    vectors = leading_eigenvectors((u * np.array([1.0, 9, 3, 7, 5, 2])) @ u.conj().T, 3)
    oracles.assert_isometric(vectors)
    np.testing.assert_allclose(np.abs(vectors.conj().T @ u[:, [1, 3, 4]]), np.eye(3), atol=1e-12)
