"""The CP gauge: unit columns, positive weights in descending order, fixed signs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.signs import leading_phases


def fix_components(weights: Array, factors: Sequence[Array], *, signs: bool = True) -> tuple[Array, list[Array]]:
    """Return the same CP tensor with unit columns, real weights >= 0 in descending order, and fixed signs.

    In every factor but the last the leading entry of each column (see `leading_phases`) is positive; the last
    factor takes the sign, or the phase, that is left. A component of weight zero keeps unit columns. Without `signs`
    they stay as they are.

    >>> weights, factors = fix_components(np.array([-1.0]), [np.array([[2.0]]), np.array([[3.0]])])
    >>> weights, factors[0], factors[1]
    (array([6.]), array([[1.]]), array([[-1.]]))
    """
    fixed: list[Array] = []
    carried = np.array(weights)  # R, complex until its phase is moved into the last factor
    for factor in factors:
        lengths = np.linalg.norm(factor, axis=0)
        first = np.zeros_like(factor)
        first[0] = 1
        unit = np.where(lengths > 0, factor / np.where(lengths > 0, lengths, 1), first)
        phases = leading_phases(unit) if signs else np.ones(unit.shape[1], unit.dtype)
        fixed.append(unit * phases.conj())
        carried = carried * (phases * lengths)
    size = np.abs(carried)
    fixed[-1] = fixed[-1] * np.where(size > 0, carried / np.where(size > 0, size, 1), 1)
    order = np.argsort(-size, kind="stable")
    dtype = factors[0].dtype
    return size[order].astype(size.dtype), [f[:, order].astype(dtype, copy=False) for f in fixed]
