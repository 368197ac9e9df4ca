r"""Linearised norm of latent vectors.

Engines normalise a latent c of r columns as g c / sqrt(|c|^2 / r + eps). Written as s c with s^2 |c|^2 / r << eps, it
becomes g s c / sqrt(eps) up to a relative error of s^2 |c|^2 / (2 r eps). The inputs x = w u of the projection, with
the weight w of an RMSNorm and |u|^2 <= d, bound |c| by |diag(w) W_DKV| sqrt(d) in the spectral norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array

EPS = 1e-6  # fixed in transformers for this norm; other engines take it from `rms_norm_eps`
_ERROR = 1e-8  # largest relative error of the linearisation, below the rounding of single precision


@dataclass(frozen=True)
class LinearNorm:
    """Factors of the rows that make the latent, of the weight of its norm, and of the matrix that reads it.

    The first two are powers of two, exact in bfloat16.
    """

    down: float
    weight: float
    up: float


def linear_norm(down: Array, norm_weight: Array) -> LinearNorm:
    """Return the factors for W_DKV (d_model, rank) that reads a stream normalised with this weight (d_model,)."""
    d_model, rank = down.shape
    largest = float(np.linalg.norm(norm_weight[:, None] * down, 2)) ** 2 * d_model / rank or 1.0  # of |c|^2 / rank
    scale = 2.0 ** math.floor(math.log2(math.sqrt(2 * EPS * _ERROR / largest)))
    weight = 2.0 ** round(math.log2(math.sqrt(EPS) / scale))
    return LinearNorm(scale, weight, math.sqrt(EPS) / (scale * weight))
