r"""A canonical basis of the residual stream: the principal axes of the stream on a text.

A model whose stream x is rotated to x R computes the same function (`rotate`), so single coordinates of the stream mean
nothing unless the basis is fixed. The eigenvectors V of the second moments X^T X of the streams X (positions, d_model)
of all layers are such a basis: those of X R are R^T V, and X R R^T V = X V. Signs are fixed by the activations X V.

LayerNorm subtracts the mean, so that only rotations that preserve the vector of ones are allowed. The axes are then
those in its complement, with coordinates of its own, and the vector of ones stays.
"""

from __future__ import annotations

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.canonical_basis import leading_phases
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.solve import leading_eigenvectors
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.checkpoints.residual_stream import read_stream
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

_RESOLVED = 1e-10  # smallest second moment, relative to the largest, that defines an axis


@accepts_models
@single_threaded_blas
def stream_basis(checkpoint: Checkpoint, tokens: Array) -> Array:
    """Return the rotation (d_model, d_model) of the residual stream to its principal axes on a text.

    `rotate(checkpoint, stream_basis(checkpoint, tokens))` is the same model for all rotations of one: the axes are
    ordered by their second moments, and signs are fixed. Axes of nearly equal second moments are not determined.

    Parameters
    ----------
    checkpoint
        A model with one residual stream; for `rotate`, norms are to be folded first.
    tokens
        (n,) or (batch, n), integers, enough for the streams to span all d_model directions.

    Raises
    ------
    ArgumentError
        If tokens do not fit the model, or are too few.

    References
    ----------
    S. Ashkboos et al., "SliceGPT: Compress Large Language Models by Deleting Rows and Columns", ICLR 2024.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens = np.random.default_rng(0).integers(0, 128, (4, 96))
    >>> turned = tnlib_adapters.rotate(model, stream_basis(model, tokens))
    >>> stream = np.concatenate([x.reshape(-1, 64) for x in run(turned, tokens).residuals])
    >>> moments = stream.T @ stream
    >>> bool(np.abs(moments - np.diag(np.diag(moments))).max() < 1e-5 * moments.max())
    True
    """
    model = as_one_stream("stream_basis", checkpoint)
    d = model.sizes.d_model
    weights = read_weights(model)
    checked = weights.embedding.check("stream_basis", tokens, weights.context)
    stream = np.concatenate([x.reshape(-1, d) for x in run(weights, checked).residuals])  # (layer position) d
    centred = any(norm.kind == "layer" for norm in read_stream(model).norms)
    frame = _complement_of_ones(d) if centred else np.eye(d)
    activations = stream @ frame
    moments = activations.T @ activations
    axes = leading_eigenvectors(moments, moments.shape[0])
    in_axes = activations @ axes  # (layer position) k
    sizes = np.square(in_axes).sum(axis=0)
    if sizes.min() < _RESOLVED * sizes.max():
        raise ArgumentError(
            f"stream_basis: tokens must span all {d} directions of the stream, got streams of rank about "
            f"{int((sizes > _RESOLVED * sizes.max()).sum())}; pass more text."
        )
    rotation = frame @ (axes * leading_phases(in_axes)) @ frame.T
    return np.asarray(rotation + 1.0 / d if centred else rotation)  # the projector on ones has entries 1 / d


def _complement_of_ones(d: int) -> Array:
    """Return orthonormal columns (d, d - 1) orthogonal to the vector of ones."""
    columns = np.eye(d)
    columns[:, 0] = 1.0
    return qr_positive(columns)[0][:, 1:]
