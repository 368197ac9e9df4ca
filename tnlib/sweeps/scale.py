"""The scale of a train, kept apart from its cores so that neither leaves the range of its dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.scale import exponent, largest, norm, shift


def even_out(cores: Sequence[Array], log_scale: float) -> tuple[list[Array], int, float]:
    """Return cores in a safe range, and (twos, factor) with 0.7 < factor < 1.5.

    exp(log_scale) times the given train is 2**twos * factor times the returned one.
    """
    exponents = [exponent(core) for core in cores]
    twos = round(log_scale / math.log(2))
    factor = math.exp(log_scale - twos * math.log(2))
    return [shift(c, -e) for c, e in zip(cores, exponents, strict=True)], twos + sum(exponents), factor


def norm_parts(cores: Sequence[Array], log_scale: float) -> tuple[float, int]:
    """Return (m, e) with m * 2**e = exp(log_scale) times the Frobenius norm of cores (r[k], n[k], r[k+1]).

    The norm of a train is that of what is left when isometries are peeled off from the left; the square is never
    formed, so a difference of two close trains keeps its digits. Powers of two are set aside at every core.
    """
    carry, scale = np.ones((1, 1), cores[0].dtype), 0
    for core in cores:
        grown = carry @ core.reshape(len(core), -1)  # l [r] n r'
        e = math.frexp(largest(grown))[1]
        scale += e
        carry = triangle(shift(grown, -e).reshape(-1, core.shape[-1]))  # l' r'
    twos = round(log_scale / math.log(2))
    return norm(carry) * math.exp(log_scale - twos * math.log(2)), scale + twos
