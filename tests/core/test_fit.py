"""Fit: its report, misses and warnings, and the line that warnings name."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib


def test_the_report() -> None:
    fit = tnlib.tt_svd(np.ones((4, 5, 6)))
    assert repr(fit).splitlines() == [
        "Fit of TensorTrain, shape 4 x 5 x 6, float64",
        "  ranks       1 1 1 1",
        "  parameters  15 of 120, 8.0 times fewer",
        "  error       roundoff, certified",
    ]


def long_train() -> tnlib.Fit[Any]:
    return tnlib.tt_svd(oracles.random_train((2,) * 17, [1, *[2] * 16, 1]))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: tnlib.svd(np.diag([3.0, 2.0, 1.0]), max_rank=2), "parameters  14 of 9, 1.6 times more"),
        (lambda: tnlib.svd(np.diag([4.0, 3.0]), rtol=0.5, max_rank=1), "error       0.6, certified, NOT converged"),
        (lambda: tnlib.svd(np.diag([1.0, 1e-13]), max_rank=1), "error       1e-13, certified"),
        (lambda: tnlib.svd(np.diag([1.0, 1e-13]).astype("f4"), max_rank=1), "error       roundoff, certified"),
        (lambda: tnlib.tucker(oracles.ghz(3, 3), ranks=2, n_iter=2), "sweeps      2"),
        (lambda: tnlib.tucker(oracles.ghz(3, 3), ranks=2), "note        ranks separates equal singular values"),
        (long_train, "ranks       1 2 2 2 2 2 2 2 ... 2 2 2 1 (18 of them, largest 2)"),
    ],
)
def test_lines_of_the_report(make: Callable[[], Any], line: str) -> None:
    fit, _ = oracles.quietly(make)
    assert f"\n  {line}" in repr(fit)


def test_it_is_frozen() -> None:
    fit = tnlib.svd(np.eye(2))
    assert [f.name for f in dataclasses.fields(fit)] == [
        *("value", "error", "certified", "converged", "n_iter", "notes", "n_calls")
    ]
    for field in dataclasses.fields(fit):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(fit, field.name, None)


X = oracles.normal((6, 6, 6))
MISSES = {
    "svd": lambda **k: tnlib.svd(X, left=0, max_rank=1, **k),
    "tt_svd": lambda **k: tnlib.tt_svd(X, max_rank=1, **k),
    "ttm_svd": lambda **k: tnlib.ttm_svd(X[0], (2, 3), (2, 3), max_rank=1, **k),
    "tucker": lambda **k: tnlib.tucker(X, ranks=1, n_iter=1, **k),
    "cp": lambda **k: tnlib.cp(X, 1, **k),
    "round": lambda **k: tnlib.round(tnlib.tt_svd(X).value, max_rank=1, **k),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_miss_warns_the_caller_once(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = MISSES[name](rtol=1e-3)
    assert [w.category for w in caught] == [tnlib.ConvergenceWarning]
    assert caught[0].filename == __file__, "a warning points at the line that called"
    message = str(caught[0].message)
    assert message.startswith(f"{name}: ")
    assert f"{fit.error:.3g}" in message
    assert "rtol=0.001" in message
    assert not fit.converged


@pytest.mark.parametrize("name", MISSES)
def test_without_a_tolerance_nothing_is_missed(name: str) -> None:
    fit = MISSES[name]()
    assert fit.converged
    assert fit.error > 0.1


@pytest.mark.parametrize("name", oracles.METHODS)
def test_a_tolerance_below_roundoff_is_no_miss(name: str) -> None:
    x = oracles.normal((6, 6))
    for rtol in (0.0, 1e-17, 1e-300):
        fit = oracles.METHODS[name](x, rtol)
        assert fit.converged
        assert fit.error <= 1e-14


@pytest.mark.parametrize("name", oracles.METHODS)
def test_degenerate_cuts_warn_once_and_point_at_the_caller(name: str) -> None:
    x = oracles.ghz(2, 4) if name != "ttm_svd" else np.eye(4)[[0, 2, 1, 3]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = oracles.METHODS[name](x, None, 2)
    assert [w.category for w in caught] == [tnlib.DegenerateCutWarning]
    assert str(caught[0].message) == f"{name}: {fit.notes[0]}"
    assert caught[0].filename == oracles.__file__
    assert fit.converged, "no tolerance was missed"


def test_warnings_have_categories_of_their_own() -> None:
    for category in (tnlib.ConvergenceWarning, tnlib.DegenerateCutWarning):
        assert issubclass(category, UserWarning)
    assert issubclass(tnlib.ArgumentError, tnlib.TnlibError)
    assert issubclass(tnlib.ArgumentError, ValueError)
    assert issubclass(tnlib.ArgumentTypeError, TypeError)
    assert issubclass(tnlib.FileFormatError, ValueError)


@pytest.mark.parametrize("name", ["full", "norm", "ranks", "cores"])
def test_what_only_the_value_has(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"use fit\.value\.{name}"):
        getattr(tnlib.tt_svd(np.ones((2, 3))), name)


def test_other_missing_attributes() -> None:
    fit = tnlib.tt_svd(np.ones((2, 3)))
    with pytest.raises(AttributeError, match=r"no attribute 'rank'$"):
        getattr(fit, "rank")  # noqa: B009 - mypy knows that it is missing
    assert copy.deepcopy(fit).error == fit.error
    assert pickle.loads(pickle.dumps(fit)).error == fit.error


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("decompose", [tnlib.svd, tnlib.tt_svd, tnlib.tucker, lambda x, **how: tnlib.cp(x, 1, **how)])
def test_subnormal_results_are_not_certified(decompose: Callable[..., tnlib.Fit[Any]], dtype: str) -> None:
    """The singular value of six ones is 2.45 times the least number, and is stored as 2."""
    x = np.full((3, 2), np.finfo(dtype).smallest_subnormal, dtype)
    fit = decompose(x, rtol=0.1)
    assert not fit.certified
    assert "subnormal" in fit.notes[-1]
    assert decompose(x * np.ldexp(np.ones(1, dtype), 60 if dtype == "float32" else 200), rtol=0.1).certified


@pytest.mark.parametrize("decompose", [tnlib.svd, tnlib.tucker, lambda x: tnlib.cp(x, 1)])
def test_a_norm_beyond_the_dtype(decompose: Callable[..., object]) -> None:
    with oracles.refused(ValueError, "norm of", "float32", "64 bits"):
        decompose(np.full((4, 4), 3e38, np.float32))


def test_a_train_of_a_norm_beyond_the_dtype() -> None:
    x = np.full((4, 4), 3e38, np.float32)
    np.testing.assert_allclose(tnlib.tt_svd(x).value.full(), x, rtol=1e-6)
