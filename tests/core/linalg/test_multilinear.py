"""Products along legs and with columns of factors."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

from tnlib.linalg.multilinear import contract_columns, khatri_rao, mode_product, unfold


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
