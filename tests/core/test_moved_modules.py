"""Module names of version 0.1 keep working."""

from __future__ import annotations

import importlib
import sys

import pytest

import tnlib
from tnlib._moved import MOVED

NAMES = {
    "tnlib.decompose.tt_svd": ["tt_svd", "ttm_svd"],
    "tnlib.formats.vidal": ["Vidal"],
    "tnlib.ops.schmidt": ["entropy", "correlation_length"],
    "tnlib.drawing.graph": ["Node", "join"],
    "tnlib.network.build": ["to_network"],
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_offers_public_names(old: str) -> None:
    new = importlib.import_module(MOVED[old])
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{old}.")]:
        del sys.modules[name]  # imported by another test
    with pytest.warns(DeprecationWarning, match=f"is deprecated; import {new.__name__} instead"):
        module = importlib.import_module(old)
    for name in NAMES.get(old, []):
        with pytest.warns(DeprecationWarning, match=rf"{old}\.{name} is deprecated; use {new.__name__}\.{name}"):
            assert getattr(module, name) is getattr(new, name)
    with pytest.raises(AttributeError):
        module.nothing  # noqa: B018


def test_modules_of_formats_that_became_packages() -> None:
    from tnlib.formats import cp, train, tucker

    assert (train.TensorTrain, train.TTMatrix) == (tnlib.TensorTrain, tnlib.TTMatrix)
    assert (tucker.Tucker, cp.CP) == (tnlib.Tucker, tnlib.CP)


def test_functions_are_not_hidden() -> None:
    sys.modules.pop("tnlib.decompose.tt_svd", None)
    with pytest.warns(DeprecationWarning, match=r"tnlib\.decompose\.tt_svd is deprecated"):
        importlib.import_module("tnlib.decompose.tt_svd")
    assert callable(tnlib.tt_svd)
