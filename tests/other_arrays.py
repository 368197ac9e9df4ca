"""Arrays of other libraries than numpy, as tests make them: torch, array_api_strict, and a device of the latter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def to_torch(a: Any) -> Any:
    return pytest.importorskip("torch").tensor(np.asarray(a))


def to_strict(a: Any) -> Any:
    return pytest.importorskip("array_api_strict").asarray(np.asarray(a))


def to_device(a: Any) -> Any:
    """Return an array that numpy cannot read: `numpy.asarray` of it raises."""
    strict = pytest.importorskip("array_api_strict")
    return strict.asarray(np.asarray(a), device=strict.Device("device1"))


MAKERS: dict[str, Callable[[Any], Any]] = {"torch": to_torch, "strict": to_strict, "device": to_device}


def kind_of(a: Any) -> tuple[type, str]:
    """Class and device of an array."""
    return type(a), str(a.device)
