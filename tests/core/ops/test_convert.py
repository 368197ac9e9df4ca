"""convert: equal to roundoff in the ranks that are exact, and a name for the decomposition where none is."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest

import tnlib

KINDS = [tnlib.TensorTrain, tnlib.TTMatrix, tnlib.Tucker, tnlib.CP, tnlib.LowRank, tnlib.SVD, tnlib.KroneckerTerms]
dtypes = oracles.each_dtype


def is_exact(value: Any, kind: type) -> bool:
    """What the documentation promises, kind by kind."""
    tensors = {tnlib.TensorTrain, tnlib.Tucker, tnlib.CP, tnlib.LowRank, tnlib.SVD}
    match value:
        case tnlib.TTMatrix():
            found = {tnlib.TensorTrain} | ({tnlib.KroneckerTerms} if len(value.cores) == 2 else set())
        case tnlib.KroneckerTerms():
            found = {tnlib.TTMatrix}
        case tnlib.SVD() if len(value.shape) != 2:
            found = set()
        case _:
            found = {tnlib.TensorTrain, tnlib.Tucker} if len(value.shape) != 2 else tensors
            found = found | ({tnlib.CP} if len(value.shape) == 1 else set())
            found = found | ({tnlib.TTMatrix} if isinstance(value, tnlib.TensorTrain) else set())
    return kind in found or isinstance(value, kind)


@pytest.mark.parametrize("value", oracles.ALL_FORMATS, ids=oracles.format_id)
def test_what_is_converted_is_equal_or_refused_with_advice(value: Any) -> None:
    for kind in KINDS:
        if not is_exact(value, kind):
            advice = "another format" if kind is tnlib.KroneckerTerms else "call tnlib."
            with oracles.refused(TypeError, f"a {kind.__name__} holds exactly", type(value).__name__, advice):
                tnlib.convert(value, kind)
            continue
        with oracles.unchanged(*value.arrays()):
            got = tnlib.convert(value, kind)
        assert isinstance(got, kind)
        want = oracles.contract(value)
        if isinstance(value, tnlib.TTMatrix) and kind is tnlib.TensorTrain:  # legs are fused, not flattened
            d = len(value.cores)
            split = want.reshape(*value.row_shape, *value.col_shape)
            want = split.transpose([leg for k in range(d) for leg in (k, d + k)]).reshape(got.shape)
        if isinstance(value, tnlib.TensorTrain) and kind is tnlib.TTMatrix:
            want = want.reshape(-1, 1)
        assert got.dtype == value.dtype
        oracles.assert_close(oracles.contract(got), want, value.dtype, 400)


@dtypes
def test_a_cp_becomes_tucker_becomes_a_train_and_comes_back(dtype: np.dtype) -> None:
    cp = tnlib.CP([3.0, 2.0, 1.0], [oracles.normal((n, 3), dtype, n) for n in (4, 2, 5, 3)])
    dense = oracles.contract(cp)
    tucker = tnlib.convert(cp, tnlib.Tucker)
    assert tucker.ranks == (3, 2, 3, 3)
    for factor in tucker.factors:
        oracles.assert_isometric(factor)
    train, direct = tnlib.convert(tucker, tnlib.TensorTrain), tnlib.convert(cp, tnlib.TensorTrain)
    assert train.ranks == direct.ranks == (1, 3, 3, 3, 1)
    again = tnlib.convert(direct, tnlib.Tucker)
    assert again.ranks == (3, 2, 3, 3)
    for factor in again.factors:
        oracles.assert_isometric(factor)
    for value in (tucker, train, direct, again):
        oracles.assert_close(value.full(), dense, dtype, 200)


@dtypes
def test_tucker_ranks_are_the_numerical_ranks(dtype: np.dtype) -> None:
    """Ranks that no bond shows: a leg of 6 that holds two vectors, between bonds of 3."""
    x = oracles.random_tucker((5, 6, 4), (3, 2, 4), dtype)
    train = tnlib.tt_svd(x).value
    tucker = tnlib.convert(train + train, tnlib.Tucker)
    assert tucker.ranks == (3, 2, 4)
    oracles.assert_close(tucker.full(), 2 * x, dtype, 200)


def test_legs_are_split_and_fused() -> None:
    t = tnlib.canonicalize(tnlib.TensorTrain(oracles.random_cores((6, 4, 9), (1, 2, 3, 1))), 1)
    a = tnlib.convert(t, tnlib.TTMatrix, row_shape=(2, 4, 3))
    assert a.row_shape == (2, 4, 3)
    assert a.col_shape == (3, 1, 3)
    assert a.center == 1
    again = tnlib.convert(a, tnlib.TensorTrain)
    oracles.assert_same_bits(again, t)
    column = tnlib.convert(t, tnlib.TTMatrix)
    assert column.shape == (216, 1)


def test_kronecker_terms_and_operators_of_two_cores() -> None:
    terms = tnlib.KroneckerTerms(
        oracles.normal((2, 3, 4)),
        [tnlib.LowRank(oracles.normal((5, 2), seed=h), oracles.normal((2, 6))) for h in (1, 2)],
    )
    operator = tnlib.convert(terms, tnlib.TTMatrix)
    assert operator.ranks == (1, 2, 1)
    again = tnlib.convert(2 * operator, tnlib.KroneckerTerms)
    assert again.ranks == (2,)
    oracles.assert_close(again.full(), 2 * terms.full())


@dtypes
def test_singular_values_come_from_the_factors(dtype: np.dtype) -> None:
    low = tnlib.LowRank(oracles.normal((6, 3), dtype), oracles.normal((3, 5), dtype))
    svd = tnlib.convert(low, tnlib.SVD)
    oracles.assert_gauge(svd)
    oracles.assert_close(svd.s, np.linalg.svd(low.full(), compute_uv=False)[:3], dtype)
    turned = tnlib.svd(low.full(), left=1).value
    oracles.assert_close(tnlib.convert(turned, tnlib.LowRank).full(), low.full(), dtype)
    oracles.assert_close(tnlib.convert(turned, tnlib.TensorTrain).full(), low.full(), dtype)


def test_long_trains() -> None:
    """GHZ states of 200 legs: a CP of two terms, diagonal cores, the Vidal form and back, and no Tucker core."""
    ghz = tnlib.CP([0.5**0.5] * 2, [np.eye(2)] * 200)
    train = tnlib.convert(ghz, tnlib.TensorTrain)
    assert train.ranks == (1, *[2] * 199, 1)
    assert train.norm() == pytest.approx(1, rel=1e-13)
    form = tnlib.convert(train, tnlib.Vidal)
    assert tnlib.distance(tnlib.convert(form, tnlib.TensorTrain), train) <= 1e-13
    product = tnlib.TensorTrain([np.full((1, 2, 1), 0.5)] * 200)
    assert tnlib.distance(tnlib.convert(product, tnlib.CP), product) <= 1e-13 * product.norm()
    with oracles.refused(ValueError, "convert: the core of a Tucker", "200", "TensorTrain"):
        tnlib.convert(train, tnlib.Tucker)
    with oracles.refused(ValueError, "convert: the core of a Tucker", "200", "CP"):
        tnlib.convert(ghz, tnlib.Tucker)


def test_itself_is_returned_as_it_is() -> None:
    for value in oracles.formats(np.float64):
        assert tnlib.convert(value, type(value)) is value


T = tnlib.TensorTrain([np.ones((1, 2, 2)), np.ones((2, 3, 2)), np.ones((2, 4, 1))])
REFUSED = [
    (lambda: tnlib.convert(T, tnlib.CP), TypeError, ["CP holds exactly", "TensorTrain", "tnlib.cp"]),
    (lambda: tnlib.convert(T, tnlib.LowRank), TypeError, ["LowRank holds exactly", "tnlib.svd"]),
    (lambda: tnlib.convert(T, np.ndarray), TypeError, ["kind must be a format", "ndarray"]),
    (lambda: tnlib.convert(T, "CP"), TypeError, ["kind must be a format", "CP"]),
    (lambda: tnlib.convert(np.ones(3), tnlib.Tucker), TypeError, ["t must be a format", "tnlib.tucker"]),
    (lambda: tnlib.convert(T, tnlib.TTMatrix, row_shape=(2, 2, 2)), ValueError, ["row_shape must divide", "(2, 3, 4)"]),
    (lambda: tnlib.convert(T, tnlib.TTMatrix, row_shape=(2, 3)), ValueError, ["row_shape must divide", "(2, 3)"]),
    (lambda: tnlib.convert(T, tnlib.TTMatrix, row_shape=2), TypeError, ["row_shape must be a sequence"]),
    (lambda: tnlib.convert(T, tnlib.Tucker, row_shape=(2, 3, 4)), TypeError, ["row_shape must be left out"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_is_not_exact_is_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "convert: ", "got", *words):
        call()
