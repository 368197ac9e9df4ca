"""The norm of a train without cancellation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.scale import largest, norm, shift


def train_norm(cores: Sequence[Array], log_scale: float) -> float:
    """Return exp(log_scale) times the Frobenius norm of cores (r[k], n[k], r[k+1]).

    The norm of a train is that of what is left when isometries are peeled off from the left; the square is never
    formed, so a difference of two close trains keeps its digits. Powers of two are set aside at every core.
    """
    carry, scale = np.ones((1, 1), cores[0].dtype), 0
    for core in cores:
        grown = carry @ core.reshape(len(core), -1)  # l [r] n r'
        e = math.frexp(largest(grown))[1]
        scale += e
        carry = triangle(shift(grown, -e).reshape(-1, core.shape[-1]))  # l' r'
    # exp(log_scale) = 2**twos * exp(rest): the cores and the scale may each leave the range and their product not
    twos = round(log_scale / math.log(2))
    return math.ldexp(norm(carry) * math.exp(log_scale - twos * math.log(2)), scale + twos)
