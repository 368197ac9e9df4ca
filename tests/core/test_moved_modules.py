"""Module names of version 0.1 keep working."""

from __future__ import annotations

import importlib

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
    module, new = importlib.import_module(old), importlib.import_module(MOVED[old])
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
    importlib.import_module("tnlib.decompose.tt_svd")
    assert callable(tnlib.tt_svd)
