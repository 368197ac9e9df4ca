"""Components of large weights: products and eigenvectors in single precision, on the device of the running model.

Cholesky factors and triangular solutions are in double precision, on the host where the device has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import RAISED, Components, components, is_large


def components_on(device: torch.device, weight: Array, reads: Array, slopes: Array) -> Components:
    """Return the components of a weight by descending loss, see `components`.

    Parameters
    ----------
    device
        Where large weights are decomposed; small ones are on the host, if this is a CPU.
    weight
        (m, n), acting on rows; the components have its dtype.
    reads
        (m, m), second moments of the inputs, or (m,) if they are diagonal.
    slopes
        (n, n), second moments of the gradient at the output.
    """
    on_host = device.type == "cpu" and not is_large(weight.shape)
    if on_host or weight.dtype == np.float64 or reads.ndim == 1:
        return components(weight, reads, slopes)
    return in_single_precision(device, weight, reads, slopes)


def in_single_precision(device: torch.device, weight: Array, reads: Array, slopes: Array) -> Components:
    """Return the components of a weight as `components_on` does of a large one."""
    if len(weight) < weight.shape[1]:
        other = in_single_precision(device, weight.T, slopes, reads)
        return Components(other.right.T, other.left.T, other.losses)
    exact = torch.device("cpu") if device.type == "mps" else device  # that has no double precision
    root = _triangular_root(_tensor(slopes, exact).double())
    onto = _tensor(weight, device) @ root.T.to(device, torch.float32)
    size = onto.norm().clamp(min=1e-30)
    scaled, moments = onto / size, _tensor(reads, device)
    gram = scaled.T @ (moments @ scaled).div_(moments.max().clamp(min=1e-30))
    del scaled, moments
    values, v = _eigenvectors(gram)
    losses = values.double().clamp(min=0).flip(0)
    v = v.flip(1)
    left = onto @ v
    right = torch.linalg.solve_triangular(root, v.to(exact, torch.float64), upper=True).T
    of_left, of_right = left.double().norm(dim=0).to(exact), right.norm(dim=1)
    balance = torch.where(of_left > 0, (of_right / of_left).sqrt(), 1.0)
    left *= balance.to(device, torch.float32)
    right /= balance[:, None]
    total = float(losses.sum())
    losses = losses / total if total > 0 else losses
    return Components(_array(left, weight.dtype), _array(right, weight.dtype), _array(losses, np.float64))


def _triangular_root(moments: Tensor) -> Tensor:
    """Return R with R^T R = C, upper triangular, as `triangular_root` does."""
    size, identity = float(moments.trace()) / len(moments), torch.eye(len(moments)).to(moments)
    if size <= 0:
        return identity
    for raised in RAISED:
        lower, failed = torch.linalg.cholesky_ex(moments / size + raised * identity)
        if not bool(failed):
            root: Tensor = lower.T
            return root
    raise ArithmeticError(f"components_on: moments of size {len(moments)} have eigenvalues far below zero")


def _eigenvectors(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors; on the host in double precision where the device fails."""
    try:
        values, vectors = torch.linalg.eigh(gram)
    except RuntimeError:  # it did not converge, or is not implemented there
        values, vectors = torch.linalg.eigh(gram.cpu().double())
    return values, vectors.to(gram)


def _tensor(values: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.float32, copy=False)).to(device)


def _array(values: Tensor, dtype: Any) -> Array:
    return values.cpu().numpy().astype(dtype, copy=False)
