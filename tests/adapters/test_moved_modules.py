"""Module names of version 0.1 keep working."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest
from tnlib_adapters._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_has_the_names_of_the_new_one(old: str) -> None:
    new = importlib.import_module(MOVED[old])
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{old}.")]:
        del sys.modules[name]  # imported by another test
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
        names = [name for name in vars(new) if not name.startswith("__")]
        assert all(getattr(module, name) is getattr(new, name) for name in names)
    messages = {str(warning.message) for warning in caught}
    assert f"{old} is deprecated; import {new.__name__} instead." in messages
    assert {f"{old}.{name} is deprecated; use {new.__name__}.{name} instead." for name in names} <= messages


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
