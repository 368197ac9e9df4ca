"""Argument checks: what they convert, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest

from tnlib._validate import (
    as_array,
    as_count,
    as_dtype,
    as_flag,
    as_legs,
    as_position,
    as_rng,
    as_rtol,
    as_sizes,
    import_optional,
    is_list,
    is_one_of,
    plural,
    to_numpy,
)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_native_arrays_are_not_copied(dtype: np.dtype) -> None:
    a = oracles.normal((3, 4), dtype)
    for layout in (a, a.T, a[::-1, ::2]):
        assert as_array("f", "x", layout) is layout
    swapped = as_array("f", "x", a.astype(dtype.newbyteorder(">")))
    assert swapped.dtype == dtype
    np.testing.assert_array_equal(swapped, a)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [([1, 2], "float64"), ((True, False), "float64"), (np.ones(2, np.float16), "float32"), (np.arange(3), "float64")],
    ids=str,
)
def test_other_numbers_are_promoted(x: Any, dtype: str) -> None:
    assert as_array("f", "x", x).dtype == dtype


def test_torch_tensors_are_detached_and_converted() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1.5, -2.0]], requires_grad=True)
    for tensor, want in (
        (x, [[1.5, -2.0]]),
        (torch.nn.Parameter(x.detach()), [[1.5, -2.0]]),
        (x.bfloat16(), [[1.5, -2.0]]),
        (x.half(), [[1.5, -2.0]]),
        (x.detach().to(torch.complex64).mul(1j).conj(), [[-1.5j, 2.0j]]),
        (torch.arange(3), [0, 1, 2]),
    ):
        a = as_array("f", "x", tensor)
        np.testing.assert_array_equal(a, want)
        assert a.dtype in (np.float32, np.float64, np.complex64)
    assert x.requires_grad


def test_arrays_that_are_refused() -> None:
    for kind, x, words in (
        (TypeError, np.ma.masked_array([1.0], [True]), ("mask", "filled")),
        (TypeError, ["a"], ("dtype",)),
        (TypeError, np.ones(2, object), ("dtype object",)),
        (ValueError, 3.0, ("at least one leg",)),
        (ValueError, np.ones((2, 0)), ("size 0", "(2, 0)")),
        (ValueError, [[1.0], [np.nan]], ("finite", "index (1, 0)")),
        (ValueError, [1.0, np.inf], ("finite", "inf", "index (1,)")),
    ):
        with oracles.refused(kind, "f: x must", *words):
            as_array("f", "x", x)
    with oracles.refused(ValueError, "f: x must have 2 legs, got shape (2,)"):
        as_array("f", "x", [1.0, 2.0], ndim=2)

    class Sparse:
        def toarray(self) -> None: ...

    with oracles.refused(TypeError, "f: x must be dense", "toarray"):
        to_numpy("f", "x", Sparse())


def test_positions_count_from_both_ends() -> None:
    assert [as_position("f", "k", k, 3, "cores") for k in (0, 2, -1, -3, np.int32(-2))] == [0, 2, 2, 0, 1]
    for wrong in (3, -4, 17):
        with oracles.refused(ValueError, "f: k must lie between -3 and 2, one of 3 cores, got", str(wrong), "from 0"):
            as_position("f", "k", wrong, 3, "cores")
    for wrong in (1.0, "1", None, True):
        with oracles.refused(TypeError, "f: k must be an integer"):
            as_position("f", "k", wrong, 3, "cores")


def test_counts_sizes_and_legs() -> None:
    assert as_count("f", "n", np.int64(3)) == 3
    with oracles.refused(ValueError, "f: n must be at least 1, got 0"):
        as_count("f", "n", 0)
    with oracles.refused(TypeError, "f: n must be an integer, got True"):
        as_count("f", "n", True)
    assert as_sizes("f", "shape", np.array([2, 3]), total=6) == (2, 3)
    with oracles.refused(ValueError, "multiply to 7", "product 6"):
        as_sizes("f", "shape", (2, 3), total=7)
    with oracles.refused(TypeError, "sequence of leg sizes"):
        as_sizes("f", "shape", 6)
    assert as_legs("f", "legs", (0, -1), 3) == (0, 2)
    assert as_legs("f", "legs", 1, 3) == (1,)
    assert as_legs("f", "legs", (2, 0, 1), 3, proper=False) == (2, 0, 1)
    for wrong in ((0, 0), (0, 1, 2), ()):
        with oracles.refused(ValueError, "f: legs must name"):
            as_legs("f", "legs", wrong, 3)
    for wrong in ((3,), (-4,)):
        with oracles.refused(ValueError, "f: legs must lie between -3 and 2, got", str(wrong), "has 3 legs"):
            as_legs("f", "legs", wrong, 3)
    with oracles.refused(TypeError, "f: legs must be leg numbers"):
        as_legs("f", "legs", "ab", 3)


def test_tolerances_flags_and_seeds() -> None:
    assert as_rtol("f", None) is None
    assert as_rtol("f", np.float32(0.5)) == 0.5
    for wrong in (-0.1, 1.5, np.nan):
        with oracles.refused(ValueError, "f: rtol must lie between 0 and 1"):
            as_rtol("f", wrong)
    for wrong in ("0.1", True, 1j):
        with oracles.refused(TypeError, "f: rtol must be a real number"):
            as_rtol("f", wrong)
    assert [as_flag("f", "b", b) for b in (True, np.False_, 1, 0)] == [True, False, True, False]
    for wrong in (2, "yes", None, 1.0):
        with oracles.refused(TypeError, "f: b must be True or False"):
            as_flag("f", "b", wrong)
    rng = np.random.default_rng(3)
    assert as_rng("f", rng) is rng
    assert as_rng("f", None).random() == as_rng("f", 0).random()
    for wrong in (True, 0.5, "seed"):
        with oracles.refused(TypeError, "f: rng must be"):
            as_rng("f", wrong)


def test_dtypes() -> None:
    assert as_dtype("f", float) == np.float64
    assert as_dtype("f", ">c8") == np.complex64
    assert as_dtype("f", ">c8").isnative
    for wrong in (int, "float16", "no dtype", object):
        with oracles.refused(TypeError, "f: dtype must be one of float32"):
            as_dtype("f", wrong)


def test_predicates() -> None:
    assert all(map(is_list, ([], (1,), range(2), np.ones(2))))
    assert not any(map(is_list, ("ab", b"ab", 3, np.ones(()), {1}, None)))
    assert is_one_of("a", ("a", "b"))
    assert not any(is_one_of(value, ("a", "b")) for value in ("c", None, np.array(["a"]), ["a"]))
    assert (plural(1, "leg"), plural(3, "leg")) == ("one leg", "3 legs")


def test_optional_packages() -> None:
    assert import_optional("f", "math", "python").pi > 3
    with pytest.raises(ModuleNotFoundError, match="f needs package, found no no_such_module; pip install package"):
        import_optional("f", "no_such_module", "package")
