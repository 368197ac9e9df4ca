"""kron is numpy.kron of the dense arrays, outer is numpy.multiply.outer, for every format that has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest

import tnlib

dtypes = pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)


def pairs(dtype: Any) -> list[tuple[Any, Any]]:
    """Two values of every format, with legs of different sizes."""

    def a(*shape: int) -> np.ndarray:
        return oracles.normal(shape, dtype, seed=sum(shape))

    def svd(m: int, n: int, r: int, left: Any = None) -> tnlib.SVD:
        s = np.arange(r, 0, -1).astype(np.finfo(dtype).dtype)
        u, v = oracles.isometry(m, r, dtype).astype(dtype), oracles.isometry(n, r, dtype).astype(dtype)
        return tnlib.SVD(u, s, v.T, left)

    low = [tnlib.LowRank(a(2, 1), a(1, 3)), tnlib.LowRank(a(2, 2), a(2, 3))]
    return [
        (
            tnlib.TensorTrain([a(1, 2, 2), a(2, 3, 1)], log_scale=1.5),
            tnlib.TensorTrain([a(1, 4, 3), a(3, 1, 1)], log_scale=-2.0),
        ),
        (tnlib.TTMatrix([a(1, 2, 3, 2), a(2, 1, 2, 1)]), tnlib.TTMatrix([a(1, 3, 1, 1)], log_scale=2.0)),
        (tnlib.Tucker(a(2, 1), [a(3, 2), a(2, 1)]), tnlib.Tucker(a(1, 2), [a(2, 1), a(4, 2)])),
        (tnlib.CP(a(2), [a(3, 2), a(2, 2)]), tnlib.CP(a(3), [a(2, 3), a(4, 3)])),
        (tnlib.LowRank(a(3, 2), a(2, 4)), tnlib.LowRank(a(2, 3), a(3, 5))),
        (svd(4, 3, 2), svd(3, 5, 3)),
        (svd(4, 3, 2, left=(1,)), svd(3, 5, 3, left=(1,))),
        (tnlib.KroneckerTerms(a(2, 3, 1), low), tnlib.KroneckerTerms(a(3, 1, 2), list(a(3, 2, 2)))),
        (tnlib.KroneckerTerms(a(2, 5, 5), list(a(2, 1, 1))), tnlib.KroneckerTerms(a(2, 1, 1), low)),
    ]


@dtypes
@pytest.mark.parametrize("k", range(len(pairs(float))))
def test_kron_is_that_of_numpy(dtype: np.dtype, k: int) -> None:
    a, b = pairs(dtype)[k]
    with oracles.unchanged(*a.arrays(), *b.arrays()):
        product = tnlib.kron(a, b)
    assert type(product) is type(a)
    assert product.dtype == dtype
    oracles.assert_close(product.full(), np.kron(oracles.contract(a), oracles.contract(b)), dtype, 200)
    if isinstance(product, tnlib.SVD):
        oracles.assert_isometric(product.u)
        assert (np.diff(product.s) <= 0).all()


@dtypes
def test_outer_is_that_of_numpy(dtype: np.dtype) -> None:
    for a, b in pairs(dtype):
        if isinstance(a, tnlib.TTMatrix | tnlib.KroneckerTerms):
            words = "outer: a and b must be two formats of one class", type(a).__name__, "call tnlib.kron"
            with oracles.refused(TypeError, *words):
                tnlib.outer(a, b)
            continue
        product = tnlib.outer(a, b)
        assert type(product) is (tnlib.TensorTrain if isinstance(a, tnlib.LowRank) else type(a))
        want = np.multiply.outer(oracles.contract(a), oracles.contract(b))
        oracles.assert_close(product.full(), want, dtype, 200)
        if isinstance(product, tnlib.SVD):
            oracles.assert_isometric(product.u)
            oracles.assert_isometric(np.moveaxis(product.vh, 0, -1).conj())
            assert (np.diff(product.s) <= 0).all()


def test_outer_of_tensors_split_in_two() -> None:
    a = tnlib.svd(oracles.normal((2, 3, 4)), left=(2, 0)).value
    b = tnlib.svd(oracles.normal((3, 2, 2)), left=1).value
    product = tnlib.outer(a, b)
    assert product.left == (2, 0, 4)
    oracles.assert_close(product.full(), np.multiply.outer(a.full(), b.full()), factor=200)


def test_terms_of_low_rank_stay_factored() -> None:
    """The side that is multiplied out is the one that takes fewer numbers."""
    a = tnlib.KroneckerTerms(np.ones((1, 2, 2)), [np.ones((1, 1))])
    b = tnlib.KroneckerTerms(np.ones((1, 2, 2)), [tnlib.LowRank(np.ones((50, 1)), np.ones((1, 50)))])
    product = tnlib.kron(a, b)
    assert all(isinstance(term, tnlib.LowRank) for term in product.right)
    oracles.assert_close(product.full(), np.kron(a.full(), b.full()))


T = tnlib.TensorTrain([np.ones((1, 2, 2)), np.ones((2, 3, 1))])
A = tnlib.TTMatrix([np.ones((1, 2, 2, 1))])
REFUSED = [
    (lambda: tnlib.kron(T, A), TypeError, ["kron: a and b must be two formats of one class", "TensorTrain and a TTM"]),
    (lambda: tnlib.outer(T, A), TypeError, ["outer: a and b must be two formats of one class", "TensorTrain and a"]),
    (lambda: tnlib.kron(1, 2), TypeError, ["kron: a and b must", "int"]),
    (lambda: tnlib.kron(tnlib.svd(np.eye(2)), 2), TypeError, ["kron: a and b must", "Fit", "pass fit.value"]),
    (lambda: tnlib.kron(T, T[0]), ValueError, ["kron: a and b must have equally many legs", "2 legs and one leg"]),
    (
        lambda: tnlib.kron(tnlib.svd(np.eye(2)).value, tnlib.svd(np.eye(2), left=1).value),
        ValueError,
        ["kron: a and b must have the same left legs", "(0,) and (1,)"],
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_products_of_other_values_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "got", *words):
        call()
