"""The sign convention: what a column vector must look like for its sign or phase to be fixed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._typing import Array


def leading_phases(u: Array, dtype: np.dtype[Any] | None = None) -> Array:
    """Return the phase of the leading entry of each column of `u` (m, r): dividing by it makes that entry positive.

    The leading entry is the first one whose modulus is within sqrt(eps) of the column's largest, so that of two
    entries equal in exact arithmetic the same one leads whatever rounding did to them; eps is that of `dtype`, in which
    they will be seen, if it is not that of `u`. Zero columns get phase 1.

    >>> leading_phases(np.array([[0.1, 1.0], [-0.9, -1.0]]))
    array([-1.,  1.])
    """
    modulus = np.abs(u)
    tolerance = np.sqrt(np.finfo(dtype or u.dtype).eps)
    leads = np.argmax(modulus >= (1.0 - tolerance) * modulus.max(axis=0), axis=0)
    columns = np.arange(u.shape[1])
    entry, size = u[leads, columns], modulus[leads, columns]
    phases: Array = np.where(size > 0, entry, 1).astype(u.dtype)
    phases /= np.where(size > 0, size, 1)
    return phases
