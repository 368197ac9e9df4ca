"""The norm of a train without cancellation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.scale import exponent, norm, shift


def train_norm(cores: Sequence[Array]) -> float:
    """Return the Frobenius norm of cores (r[k], n[k], r[k+1]), by triangular factors from the left.

    The norm of a train is that of what is left when isometries are peeled off; the square is never formed, so
    a difference of two close trains keeps its digits. Powers of two are set aside at every core.
    """
    carry, scale = np.ones((1, 1), cores[0].dtype), 0
    for core in cores:
        grown = carry @ core.reshape(len(core), -1)  # l [r] n r'
        e = exponent(grown)
        scale += e
        carry = triangle(shift(grown, -e).reshape(-1, core.shape[-1]))  # l' r'
    return math.ldexp(norm(carry), scale)
