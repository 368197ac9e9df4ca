"""The spectral radius of a matrix, and how it changes with the entries."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array


def log_radius(a: Array, *, perron: bool = False) -> tuple[float, Array]:
    """Return log rho(a) and g, (n, n), with d log rho = Re sum g * da; the radius of zero has log -inf and g = 0.

    `perron` takes the eigenvalue with the largest real part, for a map that keeps a cone: there it is the radius, and
    stands alone where others have the same modulus.
    """
    values, right = np.linalg.eig(a)
    k = int(values.real.argmax() if perron else np.abs(values).argmax())
    value, v = values[k], right[:, k]
    if value == 0:
        return -np.inf, np.zeros(a.shape, np.result_type(a.dtype, np.complex128))
    others, left = np.linalg.eig(a.conj().T)
    u = left[:, int(np.abs(others - value.conj()).argmin())]
    return float(np.log(np.abs(value))), np.outer(u.conj(), v) / (value * (u.conj() @ v))  # d value = u^H da v / u^H v
