"""What every format offers, against its definition written as one einsum; constructors refusing bad input."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import oracles
import pytest
from oracles import ALL_FORMATS, OPERATORS, format_id
from scipy.sparse.linalg import aslinearoperator

import tnlib

every_format = pytest.mark.parametrize("value", ALL_FORMATS, ids=format_id)
every_operator = pytest.mark.parametrize("value", OPERATORS, ids=format_id)


@every_format
def test_full_norm_and_counts(value: Any) -> None:
    dense = oracles.contract(value)
    assert value.shape == dense.shape
    assert value.dtype == np.result_type(*value.arrays())
    assert value.dtype in oracles.DTYPES
    assert value.full().dtype == value.dtype
    assert value.n_parameters == sum(a.size for a in value.arrays())
    assert tuple(value.named_arrays().values()) == value.arrays()
    assert (value.ndim, value.size) == (len(value.shape), int(np.prod(value.shape)))
    assert isinstance(value.n_parameters, int)
    assert isinstance(value.norm(), float)
    assert all(isinstance(n, int) for n in (*value.shape, *value.ranks))
    oracles.assert_close(value.full(), dense, value.dtype)
    assert value.norm() == pytest.approx(oracles.norm(dense), rel=100 * oracles.eps(value.dtype))


@every_format
def test_numpy_takes_it_as_an_array(value: Any) -> None:
    np.testing.assert_array_equal(np.asarray(value), value.full())
    assert np.array(value, dtype=np.complex128).dtype == np.complex128
    for dense in (value.full(), np.asarray(value)):
        assert dense.flags.writeable
        assert not any(np.shares_memory(dense, a) for a in value.arrays())
    with oracles.refused(ValueError, type(value).__name__, "copy"):
        np.asarray(value, copy=False)


@every_format
def test_its_repr_says_shape_ranks_and_size(value: Any) -> None:
    text = repr(value)
    assert type(value).__name__ in text
    assert " x ".join(map(str, value.shape)) in text
    assert str(value.ranks) in text
    assert str(value.dtype) in text
    assert "\n" not in text


@every_format
def test_it_is_frozen(value: Any) -> None:
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)
    for a in value.arrays():
        assert not a.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            a[...] = 0


def test_ranks_by_format() -> None:
    ranks = {format_id(v): v.ranks for v in oracles.formats(np.float64)}
    assert list(ranks.values()) == [
        (3,), (3,), (2,), (7,), (1, 3, 2, 1), (1, 1), (1, 1), (1, 1), (1, 2, 3, 1), (2, 3, 1), (3,), (2,), (2,), (3,),
    ]  # fmt: skip


@every_operator
def test_products_with_vectors_and_matrices(value: Any) -> None:
    dense, (m, n) = oracles.contract(value), value.shape
    for dtype in (value.dtype, np.complex128):
        v, w = oracles.normal((n,), dtype), oracles.normal((m,), dtype, seed=1)
        x, y = oracles.normal((n, 3), dtype, seed=2), oracles.normal((m, 3), dtype, seed=3)
        unit = value.dtype
        oracles.assert_close(value.matvec(v), dense @ v, unit, 200)
        oracles.assert_close(value.matvec(v[:, None]), dense @ v, unit, 200)
        oracles.assert_close(value.rmatvec(w), dense.conj().T @ w, unit, 200)
        oracles.assert_close(value.matmat(x), dense @ x, unit, 200)
        oracles.assert_close(value.rmatmat(y), dense.conj().T @ y, unit, 200)
        oracles.assert_close(value @ v, dense @ v, unit, 200)
        oracles.assert_close(value @ x, dense @ x, unit, 200)
        oracles.assert_close(w @ value, w @ dense, unit, 200)
        oracles.assert_close(y.T @ value, y.T @ dense, unit, 200)
        assert (value @ x).dtype == np.result_type(value.dtype, dtype)
        assert (y.T @ value).dtype == np.result_type(value.dtype, dtype)


@every_operator
def test_products_take_any_layout_and_change_nothing(value: Any) -> None:
    x, y = oracles.normal((value.shape[1], 4), value.dtype), oracles.normal((value.shape[0], 4), value.dtype)
    want, adjoint = value @ x, value.rmatmat(y)
    for layout in oracles.LAYOUTS.values():
        a, b = layout(x), layout(y)
        with oracles.unchanged(a, b):
            oracles.assert_close(value @ a, want, value.dtype)
            oracles.assert_close(value.rmatmat(b), adjoint, value.dtype)
    ones = np.ones(value.shape[1], int)
    oracles.assert_close(value @ ones, value.full().sum(axis=1), value.dtype, 200)


@every_operator
def test_scipy_takes_it_as_a_linear_operator(value: Any) -> None:
    operator = aslinearoperator(value)
    dense = oracles.contract(value)
    v, w = oracles.normal((value.shape[1],), value.dtype), oracles.normal((value.shape[0],), value.dtype)
    assert operator.shape == value.shape
    assert operator.dtype == value.dtype
    oracles.assert_close(operator @ v, dense @ v, value.dtype, 200)
    oracles.assert_close(operator.H @ w, dense.conj().T @ w, value.dtype, 200)
    x, y = np.stack([v, 2 * v], axis=1), np.stack([w, 2 * w], axis=1)
    oracles.assert_close(operator @ x, dense @ x, value.dtype, 200)
    oracles.assert_close(operator.rmatmat(y), dense.conj().T @ y, value.dtype, 200)


@every_operator
def test_operands_of_another_size_are_refused(value: Any) -> None:
    """A multiple of the right size could be reshaped into a wrong answer."""
    name, (m, n) = type(value).__name__, value.shape
    for method, size in (("matvec", n), ("rmatvec", m)):
        for shape in ((2 * size,), (size + 1,), (size, 2), (1, size), (2, size), (size, 1, 1), ()):
            if shape == (size, 1):
                continue
            with oracles.refused(ValueError, f"{name}.{method}: x must have shape", "got"):
                getattr(value, method)(np.ones(shape))
    for method, size in (("matmat", n), ("rmatmat", m)):
        for shape in ((2 * size, 1), (size + 1, 2), (size,), (size, 1, 1)):
            with oracles.refused(ValueError, f"{name}.{method}: x must have shape", "got"):
                getattr(value, method)(np.ones(shape))
    with oracles.refused(TypeError, name, "numbers"):
        value.matvec(np.full(n, "a"))
    with oracles.refused(TypeError, name, "array of numbers"):
        value.matvec([[1], [1, 2]])
    for multiply in (lambda x: value @ x, lambda x: x @ value):
        for x in ([[1], [1, 2]], ["a", "b"], [None]):
            with oracles.refused(TypeError, f"{name}.@: x must", "number"):
                multiply(x)


def test_a_thousand_cores_neither_overflow_nor_underflow() -> None:
    core = np.full((1, 2, 1), 1.0)
    for size in (1e-3, 1e3):
        value = tnlib.TensorTrain([size * core] * 1000, log_scale=-1000 * math.log(size * math.sqrt(2)))
        assert value.norm() == pytest.approx(1, rel=1e-9)
    mixed = tnlib.TensorTrain([1e119 * core, 1e200 * core, 1e-250 * core])
    assert mixed.norm() == pytest.approx(math.sqrt(8) * 1e69)


def test_norms_of_differences_keep_their_digits() -> None:
    """Components that cancel: squares would leave a floor at sqrt(eps) of what cancels."""
    a, small = oracles.isometry(6, 1), 1e-10
    b = oracles.isometry(6, 1, seed=1)
    tilted = a + small * b
    want = small * np.linalg.norm(b)
    ones = np.ones((1, 1))
    cases = {
        "LowRank": tnlib.LowRank(np.hstack([tilted, -a]), np.vstack([ones, ones])),
        "CP": tnlib.CP([1.0, -1.0], [np.hstack([tilted, a]), np.ones((1, 2)), np.ones((1, 2))]),
        "train": tnlib.TensorTrain([np.stack([tilted.T, -a.T], axis=-1), np.ones((2, 1, 1))]),
        "Tucker": tnlib.Tucker(np.array([[1.0], [-1.0]]), [np.hstack([tilted, a]), ones]),
        "KroneckerTerms": tnlib.KroneckerTerms(np.stack([tilted, -a]), [ones, ones]),
    }
    for name, value in cases.items():
        assert value.norm() == pytest.approx(want, rel=1e-4), name


def test_rows_come_before_columns_in_cores() -> None:
    a, b = oracles.normal((2, 3)), oracles.normal((4, 5))
    oracles.assert_close(tnlib.TTMatrix([a[None, ..., None], b[None, ..., None]]).full(), np.kron(a, b))


def test_an_svd_unpacks_to_three() -> None:
    u, s, vh = tnlib.SVD(np.eye(3, 2), [2.0, 1.0], np.eye(2))
    assert (u.shape, s.shape, vh.shape) == ((3, 2), (2,), (2, 2))


def test_integers_become_doubles_and_byte_order_native() -> None:
    assert tnlib.LowRank([[1], [2]], [[3, 4]]).dtype == np.float64
    swapped = np.ones((2, 2), ">f8")
    value = tnlib.LowRank(swapped, swapped)
    assert value.left.dtype.isnative
    assert tnlib.TensorTrain([np.ones((1, 2, 1))], center=np.int64(0)).center.__class__ is int


A, B = np.ones((3, 2)), np.ones((2, 4))
CORES = [np.ones((1, 2, 3)), np.ones((3, 4, 1))]
PAIRS = [np.ones((1, 2, 2, 3)), np.ones((3, 4, 4, 1))]
JAGGED = [[1.0, 2.0], [3.0]]

REFUSED = [
    (lambda: tnlib.LowRank(A, np.ones((3, 4))), ValueError, ["LowRank: left (m, r)", "(3, 2)", "(3, 4)", "B.T"]),
    (lambda: tnlib.LowRank(A[0], B), ValueError, ["LowRank: left must have 2 legs", "(2,)"]),
    (lambda: tnlib.LowRank(A, np.ones((2, 0))), ValueError, ["LowRank: right must have", "(2, 0)"]),
    (lambda: tnlib.LowRank(A.astype(str), B), TypeError, ["LowRank: left must be", "<U32"]),
    (lambda: tnlib.LowRank(A, np.nan * B), ValueError, ["LowRank: right must be finite", "nan"]),
    (lambda: tnlib.LowRank(JAGGED, B), TypeError, ["LowRank: left must be an array", "list"]),
    (lambda: tnlib.TensorTrain(CORES[::-1]), ValueError, ["TensorTrain: the outer bonds", "3 and 3"]),
    (
        lambda: tnlib.TensorTrain([CORES[0], np.ones((2, 4, 1))]),
        ValueError,
        ["TensorTrain: bond 1", "core 0 of shape (1, 2, 3)", "core 1 of shape (2, 4, 1)"],
    ),
    (lambda: tnlib.TensorTrain([np.ones((2, 2))]), ValueError, ["TensorTrain: core 0 must have 3 legs", "(1, 2, 2)"]),
    (lambda: tnlib.TensorTrain([CORES[0], np.ones((3, 2))]), ValueError, ["core 1 must have 3 legs", "(3, 2, 1)"]),
    (lambda: tnlib.TensorTrain(CORES) @ tnlib.TensorTrain(CORES), TypeError, ["tnlib.inner is their overlap"]),
    (lambda: tnlib.round(tnlib.TensorTrain(CORES)) + 1, TypeError, ["use fit.value"]),
    (lambda: tnlib.TensorTrain(None), TypeError, ["TensorTrain: cores must be a non-empty sequence", "NoneType"]),
    (lambda: tnlib.TensorTrain(CORES, center=2), ValueError, ["TensorTrain: center must lie between -2 and 1", "2"]),
    (lambda: tnlib.TensorTrain(CORES, center=0.0), TypeError, ["TensorTrain: center must", "0.0"]),
    (lambda: tnlib.TensorTrain(CORES, log_scale=np.inf), ValueError, ["TensorTrain: log_scale must", "inf"]),
    (lambda: tnlib.TensorTrain(CORES, log_scale="1"), TypeError, ["TensorTrain: log_scale must", "'1'"]),
    (lambda: tnlib.TTMatrix(CORES), ValueError, ["TTMatrix: core 0 must have 4 legs", "(1, 2, 3)"]),
    (lambda: tnlib.TTMatrix([PAIRS[0], PAIRS[0]]), ValueError, ["TTMatrix: bond 1", "(1, 2, 2, 3)"]),
    (lambda: tnlib.Tucker(np.ones((2, 2)), [A]), ValueError, ["Tucker: core must have one leg", "(2, 2)"]),
    (lambda: tnlib.Tucker(np.ones((2, 3)), [A, A]), ValueError, ["Tucker: factor 1 must have 3 columns", "(3, 2)"]),
    (lambda: tnlib.Tucker(np.ones(2), []), TypeError, ["Tucker: factors must be a non-empty sequence"]),
    (lambda: tnlib.CP(np.ones(3), [A, A]), ValueError, ["CP: factor 0 must have 3 columns", "(3, 2)"]),
    (lambda: tnlib.CP(np.ones((2, 1)), [A, A]), ValueError, ["CP: weights must have one leg", "(2, 1)"]),
    (lambda: tnlib.CP(np.ones(2), np.array(1.0)), TypeError, ["CP: factors must be a non-empty sequence", "ndarray"]),
    (lambda: tnlib.Vidal([np.ones((1, 2, 1))], [], None), TypeError, ["Vidal: log_scale must be a real", "None"]),
    (lambda: tnlib.SVD(A, np.ones(3), B), ValueError, ["SVD: u (..., r)", "(3, 2)", "(3,)", "(2, 4)"]),
    (lambda: tnlib.SVD(A[:, 0], np.ones(3), np.ones((3, 2))), ValueError, ["SVD: u (..., r)"]),
    (lambda: tnlib.SVD(JAGGED, np.ones(2), B), TypeError, ["SVD: u must be an array"]),
    (lambda: tnlib.SVD(A, np.ones(2), B, left=(0, 1)), ValueError, ["SVD: left must", "(0, 1)"]),
    (lambda: tnlib.SVD(A, np.ones(2), B, left="0"), TypeError, ["SVD: left must", "'0'"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_constructors_refuse_what_cannot_be(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "got", *words):
        call()


def _repeated(*shape: int) -> np.ndarray:
    """Ones that take no memory: one number with strides of 0."""
    return np.broadcast_to(1.0, shape)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tnlib.TensorTrain([np.ones((1, 2, 1))] * 65), ["TensorTrain.full: a dense array", "64 legs", "got 65"]),
        (tnlib.TensorTrain([np.ones((1, 4, 1))] * 60), ["TensorTrain.full", "memory", "2**120"]),
        (tnlib.TTMatrix([np.ones((1, 2, 2, 1))] * 200), ["TTMatrix.full", "memory", "2**400"]),
        (tnlib.CP([1.0], [np.ones((1, 1))] * 70), ["CP.full: a dense array", "64 legs", "got 70"]),
        (tnlib.CP([1.0], [np.ones((4, 1))] * 60), ["CP.full", "memory", "2**120"]),
        (tnlib.Tucker(np.ones((1,) * 30), [np.ones((16, 1))] * 30), ["Tucker.full", "memory", "2**120"]),
        (tnlib.LowRank(_repeated(2**23, 1), _repeated(1, 2**22)), ["LowRank.full", "memory", "2**45"]),
        (tnlib.SVD(_repeated(2**23, 1), np.ones(1), _repeated(1, 2**22)), ["SVD.full", "memory", "2**45"]),
        (
            tnlib.KroneckerTerms(_repeated(1, 2**11, 2**12), [_repeated(2**11, 2**11)]),
            ["KroneckerTerms.full", "memory", "2**45"],
        ),
    ],
)
def test_what_no_memory_holds_is_not_begun(value: Any, words: list[str]) -> None:
    for call in (value.full, lambda: np.asarray(value)):
        with oracles.refused(ValueError, *words):
            call()


def test_names_of_other_libraries_are_answered_with_those_of_tnlib() -> None:
    with pytest.raises(AttributeError, match=r"'to_dense'; use value\.full\(\)"):
        tnlib.TensorTrain(CORES).to_dense()
    with pytest.raises(AttributeError, match=r"attribute 'to_color'$"):
        tnlib.TensorTrain(CORES).to_color()
    with pytest.raises(AttributeError, match="No tnlib attribute MPS; use TensorTrain"):
        tnlib.MPS()
