"""Trains in the gauges of physics: mixed-canonical at any centre, and Gamma-Lambda."""

from __future__ import annotations

import math

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._validate import as_count
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.vidal import Vidal
from tnlib.gauge import train as gauge
from tnlib.linalg.scale import norm
from tnlib.linalg.threads import own_threads
from tnlib.ops.trains import T, as_train, put_together, take_apart
from tnlib.sweeps.dense import fuse_row_and_column
from tnlib.sweeps.round import schmidt_basis


@own_threads
def canonicalize(tt: T, center: int) -> T:
    """Return the same train with all cores isometric towards core `center`.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix. Where its own `center` is known, one QR per core in between is all the work.
    center
        0 for right-canonical, d - 1 for left-canonical, anything between for mixed.

    Returns
    -------
    TensorTrain | TTMatrix
        Of the same tensor; bonds are no larger than their numbers of rows on the isometric side allow. The triangular
        factors that moved have positive diagonals; for a gauge that depends on the tensor alone see `round`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `tt` is no train, or `center` names none of its cores.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.4.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ghz = tnlib.TensorTrain([np.eye(2)[None], np.eye(2)[:, :, None] * np.eye(2)[:, None], np.eye(2)[..., None]])
    >>> mixed = tnlib.canonicalize(ghz, 1)
    >>> mixed.center, f"{np.linalg.norm(mixed.cores[1]):.4f}", max(tnlib.isometry_errors(mixed)) < 1e-15
    (1, '1.4142', True)
    """
    as_train("canonicalize", "tt", tt)
    center = as_count("canonicalize", "center", center, least=0)
    if center >= len(tt.cores):
        raise ArgumentError(f"canonicalize: center must name one of {len(tt.cores)} cores, got {center}; count from 0.")
    cores, twos, factor = take_apart(tt)
    cores, more = gauge.move_center(cores, tt.center, center)
    return put_together(tt, cores, center, twos + more, factor)


def isometry_errors(tt: TensorTrain | TTMatrix, center: int | None = None) -> list[float]:
    """Return, core by core, norm(Q^H Q - 1) of the core as a matrix towards the centre; 0 for the centre itself.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix.
    center
        Where the cores are to point; the train's own by default.

    Returns
    -------
    list of float
        Of the cores as they are stored, `log_scale` aside; inf where the squares of a core leave the range of its
        dtype.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `tt` is no train, or neither it nor the caller names a centre.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tt = tnlib.TensorTrain([np.ones((1, 2, 1)), np.ones((1, 2, 1))])
    >>> tnlib.isometry_errors(tt, center=1)
    [1.0, 0.0]
    """
    as_train("isometry_errors", "tt", tt)
    center = tt.center if center is None else as_count("isometry_errors", "center", center, least=0)
    if center is None or center >= len(tt.cores):
        raise ArgumentError(
            f"isometry_errors: center must name one of {len(tt.cores)} cores, got {center}; pass one, from 0."
        )
    # as they are stored: apart from their scales, cores 1e200 times too large would pass for isometric
    return gauge.isometry_errors(fuse_row_and_column(tt.cores), center)


@own_threads
def vidal(tt: TensorTrain) -> Vidal:
    """Return the Gamma-Lambda form of `tt`, with its numerical ranks.

    Parameters
    ----------
    tt
        A TensorTrain.

    Returns
    -------
    Vidal
        Unique but for what equal Schmidt values leave open, which is fixed as everywhere in tnlib.

    Raises
    ------
    ArgumentTypeError
        If `tt` is no TensorTrain.

    References
    ----------
    G. Vidal, "Efficient classical simulation of slightly entangled quantum computations", Phys. Rev. Lett. 91 (2003).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> form = tnlib.vidal(tnlib.tt_svd(np.diag([4.0, 3.0])).value)
    >>> form.lambdas[0], f"{np.exp(form.log_scale):.1f}"
    (array([0.8, 0.6]), '5.0')
    """
    as_train("vidal", "tt", tt, TensorTrain)
    cores, twos, factor = take_apart(tt)
    isometries, spectra, more = schmidt_basis(cores, tt.dtype, diagonal=True)
    size = norm(isometries[-1])
    lambdas = [s / (np.linalg.norm(s) or 1) if s[0] > 0 else np.ones_like(s) for s in spectra]
    gammas = [isometries[0], *(a / s[:, None, None] for a, s in zip(isometries[1:], lambdas, strict=True))]
    gammas[-1] = gammas[-1] / (size or 1.0)
    log_scale = math.log(size * factor) + (twos + more) * math.log(2) if size > 0 else 0.0
    return Vidal(tuple(gammas), tuple(lambdas), log_scale)
