r"""Canonical forms of trains: all cores isometric towards one of them, the orthogonality centre.

Cores left of the centre are left-isometric, those right of it right-isometric,

    |>--|>--(C)--<|--<|         sum over l, n of conj(A[l, n, r]) A[l, n, r'] = 1
    |   |    |    |   |         sum over n, r of B[l, n, r] conj(B[l', n, r]) = 1

so that the norm, the Schmidt values and the best truncation of the whole are those of the centre alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tnlib._array_api import contiguous, reshape
from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_position
from tnlib.formats.train.cores import attach_left, attach_right, columns, rows
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import T, TTMatrix, as_train
from tnlib.linalg.canonical_basis import group_basis_change
from tnlib.linalg.orthogonal import isometry_error, qr_positive
from tnlib.linalg.scaling import Scaled, rescale
from tnlib.linalg.threads import single_threaded_blas


@single_threaded_blas
def canonicalize(tt: T, center: int) -> T:
    """Return the same train with all cores isometric towards core `center`.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix. If its own `center` is known, the cost is one QR per core between the two centres.
    center
        0 for right-canonical, d - 1 or -1 for left-canonical, anything between for mixed.

    Returns
    -------
    TensorTrain | TTMatrix
        The same tensor; bonds are no larger than the number of rows on their isometric side. The triangular factors
        that moved have positive diagonals; for a gauge that depends on the tensor alone see `canonical_form`.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.4.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> copy = np.eye(2)[:, :, None] * np.eye(2)[:, None]
    >>> ghz = tnlib.TensorTrain([np.eye(2)[None], copy, np.eye(2)[..., None]])
    >>> mixed = tnlib.canonicalize(ghz, 1)
    >>> mixed.center, f"{np.linalg.norm(mixed.cores[1]):.4f}"
    (1, '1.4142')
    >>> max(tnlib.isometry_errors(mixed)) < 1e-15
    True
    """
    as_train("canonicalize", "tt", tt, any_library=True)
    center = as_position("canonicalize", "center", center, len(tt.cores), "cores")
    return tt.unfused(move_center(tt.fused(), center))


def isometry_errors(tt: TensorTrain | TTMatrix, center: int | None = None) -> list[float]:
    r"""Return :math:`\|Q^H Q - 1\|` of every core as a matrix Q towards the centre; 0 for the centre itself.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix. Its `log_scale` has no effect.
    center
        The core towards which the others should be isometric. Default: `tt.center`; if that is None, ArgumentError is
        raised.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tt = tnlib.TensorTrain([np.ones((1, 2, 1)), np.ones((1, 2, 1))])
    >>> tnlib.isometry_errors(tt, center=1)
    [1.0, 0.0]
    """
    as_train("isometry_errors", "tt", tt)
    center = tt.center if center is None else as_position("isometry_errors", "center", center, len(tt.cores), "cores")
    if center is None:
        raise ArgumentError("isometry_errors: center must name a core of a train without a centre, got None; pass one.")
    left = [isometry_error(core.reshape(-1, core.shape[-1])) for core in tt.cores[:center]]
    right = [isometry_error(core.reshape(len(core), -1).T) for core in tt.cores[center + 1 :]]
    return [*left, 0.0, *right]


def move_center(train: TensorTrain, center: int) -> TensorTrain:
    """Return the train with its orthogonality centre at core `center`, by one QR per core on the way."""
    if train.center == center:
        return train
    cores, exponent = list(train.cores), train.exponent
    first, last = (0, len(cores) - 1) if train.center is None else (train.center, train.center)
    for k in range(first, center):
        q, r = qr_positive(rows(cores[k]))
        cores[k] = reshape(q, (*cores[k].shape[:2], -1))
        cores[k + 1], exponent = rescale(attach_left(r, cores[k + 1]), exponent)  # r' [r] n r''
    for k in range(last, center, -1):
        q, r = qr_positive(columns(cores[k]).T)  # core = r^T q^T
        cores[k] = reshape(contiguous(q.T), (-1, *cores[k].shape[1:]))
        cores[k - 1], exponent = rescale(attach_right(cores[k - 1], r.T), exponent)  # l n [l'] l''
    return TensorTrain.from_sweep(cores, center, exponent)


def change_bond_bases(cores: Sequence[Array], groups: Sequence[Sequence[slice]]) -> list[Array]:
    """Return the left-canonical train with a canonical basis in the `groups` of every bond (`group_basis_change`)."""
    out = list(cores)
    for k, of_bond in enumerate(groups):
        left, n, right = out[k].shape
        flat = out[k].reshape(left * n, right)
        change = group_basis_change(flat, of_bond)
        out[k] = change.columns(flat).reshape(left, n, right)
        following = out[k + 1]
        out[k + 1] = change.rows(following.reshape(right, -1)).reshape(following.shape)
    return out


def scaled_bond_matrix(train: TensorTrain, bond: int) -> Scaled:
    """Return a matrix with the singular values of the train cut at `bond`: the centre, moved next to the bond."""
    on_the_right = train.center is not None and train.center >= bond
    moved = move_center(train, bond if on_the_right else bond - 1)
    core = moved.cores[bond if on_the_right else bond - 1]
    matrix = core.reshape(len(core), -1).T if on_the_right else core.reshape(-1, core.shape[-1])
    return Scaled(matrix, moved.exponent)
