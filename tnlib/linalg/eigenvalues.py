"""Moduli of the leading eigenvalues of a linear map."""

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
_ITERATED = 4  # eigenvalues, of which two are returned: of close moduli ARPACK may miss the last ones


@single_threaded_blas
def leading_moduli(
    apply: Callable[[Array], Array], size: int, dtype: np.dtype[Any], *, nilpotency_bound: int
) -> tuple[float, float]:
    """Return the two largest moduli of eigenvalues of a linear map, descending; zero beyond its `size`.

    `apply` maps vectors (size,) of `dtype`, float64 or complex128. If the map were nilpotent it would vanish after
    `nilpotency_bound` steps. As many are tried, because eigenvalues of a nilpotent map of large index cannot be
    computed: rounding errors of size eps move them to eps^(1 / index). LinAlgError is raised where the iteration does
    not converge, as for many eigenvalues of the same modulus.
    """
    if size <= _DENSE:
        moduli = _dense_moduli(apply, size, dtype)
    elif _vanishes(apply, size, dtype, nilpotency_bound):
        return 0.0, 0.0
    else:
        try:
            moduli = _iterated_moduli(apply, size, dtype)
        except np.linalg.LinAlgError:
            if size > _DENSE_AT_MOST:
                raise
            moduli = _dense_moduli(apply, size, dtype)
    first, second = [*moduli.tolist(), 0.0][:2]
    return float(first), float(second)


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


def _iterated_moduli(apply: Callable[[Array], Array], size: int, dtype: np.dtype[Any]) -> Array:
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigs

    linear = LinearOperator((size, size), matvec=apply, dtype=dtype)
    start = _random_vector(size, dtype)
    try:
        with single_threaded_scipy():
            values = eigs(linear, k=_ITERATED, ncv=_KRYLOV, v0=start, maxiter=_RESTARTS, return_eigenvectors=False)
    except ArpackError as error:
        raise np.linalg.LinAlgError(str(error)) from None
    return np.sort(np.abs(values))[::-1]


def _random_vector(size: int, dtype: np.dtype[Any]) -> Array:
    return np.random.default_rng(0).standard_normal(size).astype(dtype)  # the same input gives the same output
