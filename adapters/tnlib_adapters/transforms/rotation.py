"""Rotations of the residual stream: no basis of it is privileged."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.checkpoints.residual_stream import Leg, Stream, read_stream

_ORTHOGONAL = 1e-6  # norm of R^T R - 1 over sqrt(d); float32 rotations are that good


def rotate(checkpoint: Checkpoint, rotation: Array) -> Checkpoint:
    r"""Return the model with its residual stream x in another basis, x R, computing the same function.

    What writes into the stream becomes W R, and what reads from it R^T W:

        x W  =  (x R)(R^T W)

    A norm in between must not know the basis: its weights must all be equal, as `fold` leaves them, and LayerNorm,
    which subtracts the mean, allows only rotations that keep the vector of ones. RMSNorm allows all. A model that ends
    in hidden states ends in rotated ones.

    Parameters
    ----------
    checkpoint
        Any whose attention is not stored as factors.
    rotation
        R (d_model, d_model), orthogonal.

    Returns
    -------
    Checkpoint
        Tensors are rotated when they are read. `save_checkpoint` writes them.

    Raises
    ------
    ArgumentError
        If R is not orthogonal, a norm does not commute with it, or there is a tensor as wide as the stream whose part
        in the model is not known.

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
    >>> bool(np.allclose(run(turned, [5, 6, 5]).logits, run(model, [5, 6, 5]).logits, atol=1e-4))
    True
    """
    if as_checkpoint("rotate", checkpoint).pieces is not None:
        raise ArgumentError(
            "rotate: checkpoint must hold its weights as they came, got one that is stored as factors; "
            "rotate first, then compress."
        )
    r = _as_rotation(rotation, checkpoint.sizes.d_model)
    stream = read_stream(checkpoint)
    if stream.unknown:
        raise ArgumentError(
            "rotate: every tensor as wide as the stream must be known to read or to write it, got "
            f"{stream.unknown[0]!r} in a {checkpoint.architecture.model_type}; pass the model without that part."
        )
    _check_norms(checkpoint, stream, r)
    legs = [*stream.writers, *(reader.weight for reader in stream.readers)]
    legs += [Leg(norm.bias, 0) for norm in stream.norms if norm.bias]
    changes: dict[str, Callable[[], Array]] = {
        leg.tensor: functools.partial(_turned, checkpoint, leg, r) for leg in legs
    }
    return with_tensors(checkpoint, changes)


def _turned(checkpoint: Checkpoint, leg: Leg, r: Array) -> Array:
    x = np.moveaxis(wide(checkpoint, leg.tensor), leg.leg, -1)
    return np.moveaxis(x @ r, -1, leg.leg)  # ... [d] d'


def _as_rotation(rotation: Array, d: int) -> Array:
    r = as_array("rotate", "rotation", rotation, ndim=2)
    if r.shape != (d, d) or r.dtype.kind == "c":
        raise ArgumentError(
            f"rotate: rotation must be real of shape (d_model, d_model) = ({d}, {d}), got {r.dtype} of shape "
            f"{r.shape}; the stream has as many coordinates."
        )
    r = r.astype(np.float64)
    off = float(np.linalg.norm(r.T @ r - np.eye(d)) / np.sqrt(d))
    if off > _ORTHOGONAL:
        raise ArgumentError(
            f"rotate: rotation must be orthogonal, got R^T R off the identity by {off:.2g} a column; "
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
            remedy = (
                "fold it into what reads it, with fold" if norm.place == "before" else "this model cannot be rotated"
            )
            raise ArgumentError(
                f"rotate: the weights of a norm must all be equal, got {norm.weight!r} from {weight.min():.3g} to "
                f"{weight.max():.3g}, which single out coordinates; {remedy}."
            )
    if checkpoint.architecture.norm == "layer" and stream.norms:
        ones = np.ones(len(r))
        image = r @ ones
        off = min(np.abs(image - ones).max(), np.abs(image + ones).max())
        if off > len(r) * _ORTHOGONAL:
            raise ArgumentError(
                f"rotate: rotation must keep the vector of ones, because LayerNorm subtracts the mean of "
                f"{stream.norms[0].weight!r}, got one that moves it by {off:.2g}; rotate what is orthogonal to it."
            )
