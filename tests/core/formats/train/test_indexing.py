"""Indexing of trains: slices, entries, rows and columns, as numpy indexes the dense array."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import assert_entries, reach, trains

import tnlib


@st.composite
def an_index(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    index: list[Any] = []
    for n in shape:
        if draw(st.booleans()):
            index.append(draw(st.integers(-n, n - 1)))
        else:
            index.append(draw(st.slices(n).filter(lambda s, n=n: len(range(n)[s]) > 0)))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(index)))
        index[at : draw(st.integers(at, len(index)))] = [Ellipsis]
    return tuple(index[: draw(st.integers(1, len(index)))]) if Ellipsis not in index else tuple(index)


@pytest.mark.slow
@given(trains(), st.data())
def test_slices_of_trains(t: tnlib.TensorTrain, data: st.DataObject) -> None:
    index = data.draw(an_index(t.shape))
    want = oracles.wide(oracles.contract(t))[index]
    with oracles.unchanged(*t.cores):
        got = t[index]
    assert got.dtype == t.dtype
    if want.ndim == 0:
        assert isinstance(got, np.generic)
        assert_entries(got, want, t.dtype, reach(t))
        return
    assert isinstance(got, tnlib.TensorTrain)
    assert_entries(got.full(), want, t.dtype, reach(t))
    if got.center is not None:
        assert max(tnlib.isometry_errors(got)) <= 100 * oracles.eps(t.dtype) * max(t.ranks)


def test_slices_keep_a_centre_where_it_stays_valid() -> None:
    t = tnlib.canonicalize(tnlib.TensorTrain(oracles.random_cores((4, 4, 4), (1, 3, 3, 1))), 1)
    assert t[:, ::-1].center == t[::-1].center == t[...].center == 1
    assert t[:, 1:3].center == 1
    assert t[:, 2].center == 1
    assert t[:, 2].shape == (4, 4)
    assert t[1:].center is t[0].center is t[0, 1].center is None
    last = tnlib.canonicalize(t, 2)
    assert last[..., 0].center == 1
    assert max(tnlib.isometry_errors(last[..., 0])) < 1e-14


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
@pytest.mark.parametrize("sign", [1, -1])
def test_entries_whose_partial_products_leave_the_range(dtype: type, sign: int) -> None:
    """No core needs a scale of its own: 1e-320 is subnormal, 1e320 infinite; in single precision 1e-44 and 1e44."""
    down, up = (1e-11, 1e7) if dtype is np.float32 else (1e-80, 1e70)
    values = [down] * 4 + [up] * 4
    t = tnlib.TensorTrain([np.full((1, 2, 1), x**sign, dtype) for x in values])
    assert t.exponent == 0
    assert t[(1,) * 8] == pytest.approx((down * up) ** (4 * sign), rel=100 * float(np.finfo(dtype).eps), abs=0.0)


@oracles.each_dtype
@pytest.mark.parametrize("order", ["C", "F"])
def test_cores_with_nan_or_inf_are_refused(dtype: np.dtype, order: Any) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        cores = [np.array(core, order=order) for core in oracles.random_cores((3, 80, 3), (1, 4, 30, 1), dtype)]
        cores[1][2, 70, 5] = bad
        with oracles.refused(ValueError, "TensorTrain: core 1 must be finite", "at index (2, 70, 5)"):
            tnlib.TensorTrain(cores)


def test_a_train_is_gone_through_as_an_array() -> None:
    t = tnlib.TensorTrain(oracles.random_cores((3, 4, 2), (1, 2, 2, 1)))
    parts = list(t)
    assert len(parts) == 3
    for part, want in zip(parts, t.full(), strict=True):
        oracles.assert_close(part.full(), want, factor=200)
    assert [float(x) for x in parts[0][0]] == pytest.approx(t.full()[0, 0])


@oracles.each_dtype
def test_rows_and_columns_of_operators(dtype: np.dtype) -> None:
    a = tnlib.TTMatrix([oracles.normal(s, dtype) for s in ((1, 2, 3, 2), (2, 4, 2, 3), (3, 1, 2, 1))], log_scale=2.0)
    dense = oracles.contract(a)
    for i in (0, 5, -1):
        for j in (3, -12, 11):
            oracles.assert_close(a[i, j], dense[i, j], dtype, 1e4)
            oracles.assert_close(a[:, j].full().reshape(-1), dense[:, j], dtype, 200)
            assert a[:, j].shape == a.row_shape
        oracles.assert_close(a[i].full().reshape(-1), dense[i], dtype, 200)
        assert a[i, :].shape == a.col_shape
    assert a[:, :] is a
    assert a[...] is a


def test_entries_of_an_operator_on_200_spins() -> None:
    """Flat indices beyond 64 bits: the operator that flips all spins has its ones on the antidiagonal."""
    flip = tnlib.TTMatrix([np.array([[0.0, 1.0], [1.0, 0.0]]).reshape(1, 2, 2, 1)] * 200)
    i = 3**100 % 2**200
    assert flip[i, 2**200 - 1 - i] == 1
    assert flip[i, i] == 0
    assert flip[-1, 0] == 1
    column = flip[:, i]
    assert column.norm() == pytest.approx(1)
    bits = [int(b) for b in f"{2**200 - 1 - i:0200b}"]
    assert tnlib.entries(column, bits) == 1


T = tnlib.TensorTrain([np.ones((1, 2, 3)), np.ones((3, 4, 1))])
A = tnlib.TTMatrix([np.ones((1, 2, 2, 1)), np.ones((1, 3, 4, 1))])

REFUSED = [
    (lambda: T[2], ValueError, ["TensorTrain: the index of leg 0", "-2 and 1", "got 2"]),
    (lambda: T[0, -5], ValueError, ["TensorTrain: the index of leg 1", "got -5"]),
    (lambda: T[0, 0, 0], ValueError, ["TensorTrain: an index", "2 legs", "got 3"]),
    (lambda: T[..., 0, ...], ValueError, ["one ellipsis"]),
    (lambda: T[[0, 1]], TypeError, ["leg 0 must be given", "list", "tnlib.entries"]),
    (lambda: T[np.array([0, 1])], TypeError, ["ndarray", "tnlib.entries"]),
    (lambda: T[None], TypeError, ["leg 0 must", "NoneType"]),
    (lambda: T[True], TypeError, ["leg 0 must", "bool"]),
    (lambda: T[1.0], TypeError, ["leg 0 must", "float"]),
    (lambda: T[:, 2:2], ValueError, ["slice of leg 1", "of 4"]),
    (lambda: T[::0], TypeError, ["slice of leg 0", "step"]),
    (lambda: T["a":"b"], TypeError, ["slice of leg 0"]),
    (lambda: A[6], ValueError, ["TTMatrix: the index of leg 0", "got 6"]),
    (lambda: A[1:3], TypeError, ["TTMatrix: an index must be an integer or :", "convert"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_impossible_indices_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, *words):
        call()
