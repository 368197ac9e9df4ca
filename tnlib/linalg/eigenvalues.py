"""Leading eigenvalues: moduli of those of a linear map, and the spectral radius of a matrix with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.threads import single_threaded_blas, single_threaded_scipy

_DENSE = 256  # size up to which LAPACK needs no longer than ARPACK
_DENSE_AT_MOST = 1024  # size up to which LAPACK is the resort where ARPACK does not converge; it then takes a second
_KRYLOV = 40  # dimension of the Krylov spaces
_RESTARTS = 100  # random and physical maps converge within 30
_SPARE = 2  # eigenvalues beyond those that are returned: of close moduli ARPACK may miss the last ones


@single_threaded_blas
def leading_moduli(
    apply: Callable[[Array], Array], size: int, dtype: np.dtype[Any], *, count: int = 2, nilpotency_bound: int = 1
) -> Array:
    """Return the `count` largest moduli of eigenvalues of a linear map, descending; zeros beyond its `size`.

    `apply` maps vectors (size,) of `dtype`, float64 or complex128. If the map were nilpotent it would vanish after
    `nilpotency_bound` steps. As many are tried, because eigenvalues of a nilpotent map of large index cannot be
    computed: rounding errors of size eps move them to eps^(1 / index). LinAlgError is raised where the iteration does
    not converge, as for many eigenvalues of the same modulus.
    """
    if size <= _DENSE:
        moduli = _dense_moduli(apply, size, dtype)
    elif _vanishes(apply, size, dtype, nilpotency_bound):
        moduli = np.zeros(count)
    else:
        try:
            moduli = _iterated_moduli(apply, size, dtype, count + _SPARE)
        except np.linalg.LinAlgError:
            if size > _DENSE_AT_MOST:
                raise
            moduli = _dense_moduli(apply, size, dtype)
    return np.pad(moduli[:count], (0, max(0, count - len(moduli))))


def _dense_moduli(apply: Callable[[Array], Array], size: int, dtype: np.dtype[Any]) -> Array:
    matrix = np.array([apply(column) for column in np.eye(size, dtype=dtype)])  # the transpose
    return np.sort(np.abs(np.linalg.eigvals(matrix)))[::-1]


def _vanishes(apply: Callable[[Array], Array], size: int, dtype: np.dtype[Any], steps: int) -> bool:
    """Test if `steps` applications take a random vector to zero exactly."""
    x = _random_vector(size, dtype)
    for _ in range(steps):
        x = apply(x)
        length = float(np.linalg.norm(x))
        if length == 0.0:
            return True
        x = x / length
    return False


def _iterated_moduli(apply: Callable[[Array], Array], size: int, dtype: np.dtype[Any], count: int) -> Array:
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigs

    linear = LinearOperator((size, size), matvec=apply, dtype=dtype)
    start = _random_vector(size, dtype)
    try:
        with single_threaded_scipy():
            values = eigs(linear, k=count, ncv=_KRYLOV, v0=start, maxiter=_RESTARTS, return_eigenvectors=False)
    except ArpackError as error:
        raise np.linalg.LinAlgError(str(error)) from None
    return np.sort(np.abs(values))[::-1]


def _random_vector(size: int, dtype: np.dtype[Any]) -> Array:
    return np.random.default_rng(0).standard_normal(size).astype(dtype)  # the same input gives the same output


def log_radius(a: Array, *, perron: bool = False) -> tuple[float, Array]:
    """Return log rho(a) and g, (n, n), with d log rho = Re sum g * da; for radius 0, -inf and g = 0.

    `perron` takes the eigenvalue with the largest real part. For a map that preserves a cone this is the spectral
    radius, and it is simple where other eigenvalues have the same modulus.
    """
    values, right = np.linalg.eig(a)
    k = int(values.real.argmax() if perron else np.abs(values).argmax())
    value, v = values[k], right[:, k]
    if value == 0:
        return -np.inf, np.zeros(a.shape, np.result_type(a.dtype, np.complex128))
    adjoint_values, left = np.linalg.eig(a.conj().T)
    u = left[:, int(np.abs(adjoint_values - value.conj()).argmin())]
    return float(np.log(np.abs(value))), np.outer(u.conj(), v) / (value * (u.conj() @ v))  # d value = u^H da v / u^H v
