"""Rotary embeddings whose frequencies are a geometric sequence, divided by one factor."""

from __future__ import annotations

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import AttentionWiring


def base_and_factor(attention: AttentionWiring) -> tuple[float, float] | None:
    """Return base b and factor f of frequencies b^(-j / n) / f of planes j < n; None for others, or that vary.

    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> base_and_factor(model.wiring.layers[0].attention)
    (10000.0, 1.0)
    """
    turning = attention.frequencies(None, "compress")
    if turning is None or turning.factor != 1:
        return None
    n, radians = len(turning.radians), np.asarray(turning.radians, float)
    base = _rounded((radians[0] / radians[1]) ** n) if n > 1 else 1e4  # any, for one plane
    if not np.allclose(radians, radians[0] * base ** (-np.arange(n) / n), rtol=1e-9) or _varies(attention, radians):
        return None
    return base, _rounded(1 / radians[0])


def _varies(attention: AttentionWiring, radians: Array) -> bool:
    """Test if frequencies are others beyond the context, as those of the dynamic variant."""
    if attention.context is None:
        return False
    try:
        longer = attention.frequencies(attention.context + 1, "compress")
    except ArgumentError:  # no model of such length
        return False
    return longer is not None and not np.array_equal(longer.radians, radians)


def _rounded(value: float) -> float:
    """Return a number with 12 digits: what config.json stated, freed from the rounding of powers."""
    return float(f"{value:.12g}")
