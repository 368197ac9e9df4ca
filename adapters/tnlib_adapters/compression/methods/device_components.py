"""Components of large weights: products and eigenvectors in single precision, on the device of the running model.

Weights of one shape are one batch there. Cholesky factors and triangular solutions are in double precision, on the host
where the device has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import RAISED, Components, WeightOnText, components, is_large

_BATCH = 2**27  # numbers of the weights and moments of a batch: half a GiB in single precision


def components_on(device: torch.device, weights: Mapping[str, WeightOnText]) -> Iterator[tuple[str, Components]]:
    """Yield the keys of weights and their components by descending loss, see `components`.

    Parameters
    ----------
    device
        Where large weights are decomposed; if it is not a CPU, all but tables of embeddings, those of one shape
        together. On a CPU a batch would save no time, and the moments of one weight are in memory at a time.
    weights
        By their keys.
    """
    for keys in _batches(weights, 1 if _is_host(device) else _BATCH):
        yield from zip(keys, _components_of_batch(device, [weights[key] for key in keys]), strict=True)


def in_single_precision(
    device: torch.device, weights: Sequence[Array], reads: Sequence[Array], slopes: Sequence[Array]
) -> list[Components]:
    """Return the components of weights of one shape (m, n), with moments (m, m) and (n, n), as one batch."""
    if len(weights[0]) < weights[0].shape[1]:
        transposed = in_single_precision(device, [weight.T for weight in weights], slopes, reads)
        return [Components(other.right.T, other.left.T, other.losses) for other in transposed]
    exact = torch.device("cpu") if device.type == "mps" else device  # that has no double precision
    roots = _triangular_roots(_stack(slopes, exact).double())  # b n n
    onto = _stack(weights, device) @ roots.mT.to(device, torch.float32)  # b m n
    sizes = onto.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)
    scaled, moments = onto / sizes, _stack(reads, device)
    gram = scaled.mT @ (moments @ scaled).div_(moments.amax((1, 2), keepdim=True).clamp(min=1e-30))
    del scaled, moments
    values, v = _eigenvectors(gram)
    losses = values.double().clamp(min=0).flip(1)
    v = v.flip(2)
    left = onto @ v
    right = torch.linalg.solve_triangular(roots, v.to(exact, torch.float64), upper=True).mT
    of_left, of_right = left.double().norm(dim=1).to(exact), right.norm(dim=2)
    balance = torch.where(of_left > 0, (of_right / of_left).sqrt(), 1.0)
    left *= balance[:, None].to(device, torch.float32)
    right /= balance[:, :, None]
    totals = losses.sum(dim=1, keepdim=True)
    losses /= torch.where(totals > 0, totals, 1.0)
    dtype = weights[0].dtype
    return [
        Components(_array(left[k], dtype), _array(right[k], dtype), _array(losses[k], np.float64))
        for k in range(len(weights))
    ]


def _batches(weights: Mapping[str, WeightOnText], n_numbers: int) -> Iterator[list[str]]:
    """Yield keys of weights of one shape and dtype, as many as have `n_numbers` numbers with their moments."""
    of_shape: dict[tuple[Any, ...], list[str]] = {}
    for key, own in weights.items():
        of_shape.setdefault((*own.weight.shape, own.weight.dtype), []).append(key)
    for (m, n, _), keys in of_shape.items():
        size = max(1, n_numbers // (m * m + m * n + n * n))
        yield from (keys[k : k + size] for k in range(0, len(keys), size))


def _components_of_batch(device: torch.device, batch: Sequence[WeightOnText]) -> list[Components]:
    weights = [own.weight for own in batch]
    reads, slopes = [own.reads() for own in batch], [own.slopes() for own in batch]
    on_host = _is_host(device) and not is_large(weights[0].shape)
    if on_host or weights[0].dtype == np.float64 or any(moments.ndim == 1 for moments in reads):
        return list(map(components, weights, reads, slopes))
    return in_single_precision(device, weights, reads, slopes)


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _triangular_roots(moments: Tensor) -> Tensor:
    """Return R with R^T R = C, upper triangular, for every C of (b, n, n), as `triangular_root` does."""
    n = moments.shape[-1]
    identity = torch.eye(n).to(moments)
    sizes = moments.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] / n
    scaled = torch.where(sizes > 0, moments / sizes.clamp(min=1e-300), identity)
    roots, missing = scaled, torch.ones_like(sizes, dtype=torch.bool)
    for raised in RAISED:
        lower, failed = torch.linalg.cholesky_ex(scaled + raised * identity)
        roots = lower if bool(missing.all()) else torch.where(missing, lower, roots)
        missing = missing & (failed != 0)[:, None, None]
        if not bool(missing.any()):
            return roots.mT
    raise ArithmeticError(f"components_on: moments of size {n} have eigenvalues far below zero")


def _eigenvectors(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors; on the host in double precision where the device fails."""
    try:
        values, vectors = torch.linalg.eigh(gram)
    except RuntimeError:  # it did not converge, or is not implemented there
        values, vectors = torch.linalg.eigh(gram.cpu().double())
    return values, vectors.to(gram)


def _stack(arrays: Sequence[Array], device: torch.device) -> Tensor:
    """Return arrays as one tensor in single precision; a single one is not copied."""
    tensors = [torch.from_numpy(array.astype(np.float32, copy=False)).to(device) for array in arrays]
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _array(values: Tensor, dtype: Any) -> Array:
    return values.cpu().numpy().astype(dtype, copy=False)
