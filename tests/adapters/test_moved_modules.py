"""Module names of version 0.1 keep working."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest
from tnlib_adapters._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_module(old: str) -> None:
    new = importlib.import_module(f"tnlib_adapters.{MOVED[old]}")
    spec = new.__spec__
    for name in [name for name in sys.modules if f"{name}.".startswith(f"tnlib_adapters.{old.split('.')[0]}.")]:
        if sys.modules[name].__name__ != name:  # an alias that another test imported
            del sys.modules[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert importlib.import_module(f"tnlib_adapters.{old}") is new
    messages = [str(warning.message) for warning in caught]
    assert f"tnlib_adapters.{old} is deprecated; import {new.__name__} instead." in messages
    assert new.__spec__ is spec


def test_other_names_are_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tnlib_adapters\.nothing'"):
        importlib.import_module("tnlib_adapters.nothing")


def test_old_names_of_modules_that_became_packages() -> None:
    import tnlib_adapters
    from tnlib_adapters.attention.frozen import FrozenAttention
    from tnlib_adapters.circuits.composition import compositions
    from tnlib_adapters.circuits.paths import path_contributions

    assert FrozenAttention is tnlib_adapters.FrozenAttention
    assert compositions is tnlib_adapters.circuits.compositions
    assert path_contributions is tnlib_adapters.circuits.path_contributions
