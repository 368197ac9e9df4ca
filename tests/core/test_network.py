"""tnlib.network, the old name of tnlib.interop.quimb."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tnlib
from tnlib import network
from tnlib.interop import quimb


def test_every_name_is_that_of_the_new_package_with_a_warning() -> None:
    assert set(network.__all__) == set(dir(network)) == set(quimb.__all__)
    for name in quimb.__all__:
        with pytest.warns(DeprecationWarning, match=rf"tnlib\.network\.{name} is deprecated"):
            value = getattr(network, name)
        assert value is getattr(quimb, name)


def test_it_is_an_attribute_of_the_library() -> None:
    code = "import tnlib; print(tnlib.network.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "tnlib.network"


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match=r"No tnlib\.interop\.quimb attribute contractt"):
        network.contractt  # noqa: B018


def test_the_spectral_reduction_is_one_of_circuits() -> None:
    from tnlib_adapters import circuits

    for name in tnlib.experimental.__all__:
        with pytest.warns(DeprecationWarning, match=rf"tnlib\.experimental\.{name} is deprecated; use tnlib_adapters"):
            assert getattr(tnlib.experimental, name) is getattr(circuits, name)
