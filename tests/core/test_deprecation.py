"""Old names keep working and warn with the new one."""

from __future__ import annotations

import inspect
import math

import oracles
import pytest

import tnlib
from tnlib._deprecation import deprecated_module, renamed_arguments, renamed_names


@renamed_arguments(value="t", legs="axis")
def total(t: int, axis: int = 0) -> int:
    """Return the sum."""
    return t + axis


def test_old_keywords() -> None:
    assert total(1, 2) == total(1, axis=2) == total(t=1, axis=2) == 3
    with pytest.warns(DeprecationWarning, match=r"^total: legs= is deprecated; use axis= instead.$") as caught:
        assert total(1, legs=2) == 3  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="value= is deprecated"):
        assert total(value=1) == 1  # type: ignore[call-arg]
    with oracles.refused(TypeError, "total: axis must be passed once, got legs= and axis=", "drop legs="):
        total(1, axis=2, legs=3)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="value="), pytest.raises(TypeError, match="multiple values"):
        total(1, value=2)  # type: ignore[call-arg]
    assert list(inspect.signature(total).parameters) == ["t", "axis"]
    assert total.__doc__ == "Return the sum."


def test_an_old_module() -> None:
    load = deprecated_module("old", "math")
    with pytest.warns(DeprecationWarning, match=r"^old.sqrt is deprecated; use math.sqrt instead.$"):
        assert load("sqrt") is math.sqrt
    for name in ("no_such_name", "__path__"):
        with pytest.raises(AttributeError):
            load(name)


def test_the_first_argument_of_every_verb() -> None:
    """`t` throughout; functions of two formats name them a and b."""
    for name in ("round", "convert", "entries", "contract", "sum_legs", "canonical_form", "degenerate_groups"):
        assert next(iter(inspect.signature(getattr(tnlib, name)).parameters)) == "t"
    for name in ("inner", "distance", "kron"):
        assert list(inspect.signature(getattr(tnlib, name)).parameters)[:2] == ["a", "b"]


def test_an_old_name_of_a_class_or_function_warns_and_is_the_new_one() -> None:
    load = renamed_names("tnlib._errors", {"OldError": "ArgumentError"})
    with pytest.warns(
        DeprecationWarning, match=r"tnlib\._errors\.OldError is deprecated; use tnlib\._errors\.Argument"
    ):
        assert load("OldError") is tnlib.ArgumentError
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        load("nothing")
