"""Rotations of the basis of the residual stream, and its canonical basis: the principal axes of the stream on a text.

A model whose stream x is rotated to x R computes the same function (`rotate`), so single coordinates of the stream mean
nothing unless the basis is fixed. The eigenvectors V of the second moments X^T X of the streams X (positions, d_model)
of all layers are such a basis: those of X R are R^T V, and X R R^T V = X V. Signs are fixed by the activations X V.

LayerNorm subtracts the mean, so that only rotations that preserve the vector of ones are allowed. The axes are then
those in its complement, with coordinates of its own, and the vector of ones stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.linalg.canonical_basis import leading_phases
from tnlib.linalg.multilinear import leading_eigenvectors
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_dense, as_one_stream
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.checkpoints.residual_stream import Stream, StreamAxis, read_stream
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

_ORTHOGONAL = 1e-6  # norm of R^T R - 1 over sqrt(d): accuracy of float32 rotations


@accepts_models
def rotate(checkpoint: Checkpoint, rotation: Array) -> Checkpoint:
    """Return the model with its residual stream x in another basis, :math:`x R`, computing the same function.

    Output weights W into the stream become :math:`W R`, and input weights :math:`R^T W`, because

    .. math:: x W = (x R)(R^T W)

    Norms must commute with R: their weights must all be equal, as after `fold`, and LayerNorm, which subtracts the
    mean, allows only rotations that preserve the vector of ones. RMSNorm allows all. A model that ends in hidden states
    ends in rotated ones.

    Parameters
    ----------
    checkpoint
        Any checkpoint whose attention is not stored as factors.
    rotation
        R (d_model, d_model), orthogonal.

    Returns
    -------
    Checkpoint
        Tensors are rotated when they are read. `save_checkpoint` writes them.

    Raises
    ------
    ArgumentError
        If R is not orthogonal, a norm does not commute with it, or the role of a tensor as wide as the stream is
        unknown.

    References
    ----------
    S. Ashkboos et al., "SliceGPT: Compress Large Language Models by Deleting Rows and Columns", ICLR 2024, section 3.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> r = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))[0]
    >>> turned = rotate(model, r)
    >>> [f"{run(one, [5, 6, 5]).logits.max():.3f}" for one in (model, turned)]
    ['6.788', '6.788']
    """
    as_dense("rotate", checkpoint, "rotate")
    r = _as_rotation(rotation, checkpoint.sizes.d_model)
    stream = read_stream(checkpoint)
    if stream.unknown:
        raise ArgumentError(
            "rotate: every tensor as wide as the stream must have a known role, got "
            f"{stream.unknown[0]!r} in a {checkpoint.wiring.model_type}; pass the model without that part."
        )
    _check_norms(checkpoint, stream, r)
    legs = [*stream.writers, *(StreamAxis(reader.weight, reader.input_axis) for reader in stream.readers)]
    legs += [StreamAxis(norm.bias, 0) for norm in stream.norms if norm.bias]
    changes: dict[str, Callable[[], Array]] = {
        leg.tensor: functools.partial(_turned, checkpoint, leg, r) for leg in legs
    }
    return with_tensors(checkpoint, changes)


def _turned(checkpoint: Checkpoint, leg: StreamAxis, r: Array) -> Array:
    x = np.moveaxis(wide(checkpoint, leg.tensor), leg.axis, -1)
    return np.moveaxis(x @ r, -1, leg.axis)  # ... [d] d'


def _as_rotation(rotation: Array, d: int) -> Array:
    r = as_array("rotate", "rotation", rotation, ndim=2)
    if r.shape != (d, d) or r.dtype.kind == "c":
        raise ArgumentError(
            f"rotate: rotation must be real of shape (d_model, d_model) = ({d}, {d}), got {r.dtype} of shape "
            f"{r.shape}; d_model is the width of the stream."
        )
    r = r.astype(np.float64)
    off = float(np.linalg.norm(r.T @ r - np.eye(d)) / np.sqrt(d))
    if off > _ORTHOGONAL:
        raise ArgumentError(
            f"rotate: rotation must be orthogonal, got ||R^T R - 1|| = {off:.2g} sqrt(d_model); "
            "pass for example the first factor of numpy.linalg.qr."
        )
    return r


def _check_norms(checkpoint: Checkpoint, stream: Stream, r: Array) -> None:
    """Raise where a norm does not commute with the rotation."""
    if np.array_equal(r, np.eye(len(r))):
        return
    for norm in stream.norms:
        weight = wide(checkpoint, norm.weight)
        if not np.allclose(weight, weight[0], rtol=1e-6, atol=1e-12):
            remedy = "call fold first" if norm.place == "pre" else "this model cannot be rotated"
            raise ArgumentError(
                f"rotate: the weights of a norm must all be equal, got {norm.weight!r} from {weight.min():.3g} to "
                f"{weight.max():.3g}, which depend on the coordinate; {remedy}."
            )
    centring = next((norm for norm in stream.norms if norm.kind == "layer"), None)
    if centring is not None:
        ones = np.ones(len(r))
        image = r @ ones
        off = min(np.abs(image - ones).max(), np.abs(image + ones).max())
        if off > len(r) * _ORTHOGONAL:
            raise ArgumentError(
                f"rotate: rotation must preserve the vector of ones, because LayerNorm subtracts the mean of "
                f"{centring.weight!r}, got one that moves it by {off:.2g}; rotate only its orthogonal complement."
            )


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
    >>> moments = stream.T @ stream  # diagonal
    >>> [f"{fraction:.2f}" for fraction in np.diag(moments)[:3] / np.trace(moments)]
    ['0.08', '0.05', '0.05']
    >>> bool(np.abs(moments - np.diag(np.diag(moments))).max() < 1e-5 * moments.max())
    True
    """
    model = as_one_stream("stream_basis", checkpoint)
    d = model.sizes.d_model
    weights = read_weights(model)
    checked = weights.embedding.check("stream_basis", tokens, weights.context)
    stream = np.concatenate([x.reshape(-1, d) for x in run(weights, checked).residuals])  # (layer position) d
    centred = any(norm.kind == "layer" for norm in read_stream(model).norms)
    basis = complement_of_ones(d) if centred else np.eye(d)
    activations = stream @ basis
    moments = activations.T @ activations
    axes = leading_eigenvectors(moments, moments.shape[0])
    in_axes = activations @ axes  # (layer position) k
    sizes = np.square(in_axes).sum(axis=0)
    if sizes.min() < _RESOLVED * sizes.max():
        raise ArgumentError(
            f"stream_basis: tokens must span all {d} directions of the stream, got streams of rank about "
            f"{int((sizes > _RESOLVED * sizes.max()).sum())}; pass more text."
        )
    rotation = basis @ (axes * leading_phases(in_axes)) @ basis.T
    return np.asarray(rotation + 1.0 / d if centred else rotation)  # the projector on ones has entries 1 / d


def complement_of_ones(d: int) -> Array:
    """Return orthonormal columns (d, d - 1) orthogonal to the vector of ones."""
    columns = np.eye(d)
    columns[:, 0] = 1.0
    return qr_positive(columns)[0][:, 1:]
