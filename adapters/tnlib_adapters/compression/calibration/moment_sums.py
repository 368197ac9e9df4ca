"""Second moments of tensors, summed over batches, and tensors that are kept until they are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import second_moments
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.files.process_memory import BATCH_TOKENS


class StoredTensors:
    """Tensors of a device by key, several of each, in the memory or the files of a workspace."""

    def __init__(self, workspace: Workspace, device: torch.device) -> None:
        self._workspace, self._device = workspace, device
        self._stored: dict[str, StoredArrays] = {}  # by their number

    def add(self, key: str, x: torch.Tensor) -> None:
        """Add a tensor of this key."""
        stored = self._stored.setdefault(key, StoredArrays(self._workspace))
        stored.add({str(len(stored)): on_host(x)})

    def of(self, key: str) -> Iterator[torch.Tensor]:
        """Yield the tensors of this key in their order."""
        return (torch.from_numpy(array).to(self._device) for array in self._stored[key].values())

    def remove(self, key: str) -> None:
        """Free the memory or the files of this key."""
        del self._stored[key]


class MomentSums:
    """Second moments by key, summed over batches. Short batches are put together: each product passes over the sum.

    With a workspace the rows are in it until `finish`, and then the sums.
    """

    def __init__(self, workspace: Workspace | None, device: torch.device) -> None:
        self._workspace = workspace or Workspace()
        self._stored = None if workspace is None else StoredTensors(workspace, device)
        self._sums: dict[str, Any] = {}  # arrays on the host, tensors on another device
        self._waiting: dict[str, list[torch.Tensor]] = {}

    def add(self, key: str, x: torch.Tensor) -> None:
        """Add x (..., width)."""
        rows = x.reshape(-1, x.shape[-1])
        waiting = self._waiting.setdefault(key, [])
        if sum(map(len, waiting)) + len(rows) > BATCH_TOKENS:
            self._put_together(key)
        self._waiting[key].append(rows)

    def finish(self) -> StoredArrays:
        """Return the sums."""
        sums = StoredArrays(self._workspace)
        for key in self._waiting:
            self._put_together(key)
            if self._stored is not None:
                for rows in self._stored.of(key):
                    add_to(self._sums, key, _second_moments_on_device(rows))
                self._stored.remove(key)
            sums.add({key: on_host(self._sums.pop(key))})
        return sums

    def _put_together(self, key: str) -> None:
        if waiting := self._waiting[key]:
            rows = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            if self._stored is None:
                add_to(self._sums, key, _second_moments_on_device(rows))
            else:
                self._stored.add(key, rows)
        self._waiting[key] = []


def add_to(sums: dict[str, Any], key: str, batch_sum: Any) -> None:
    """Add to the sum of this key, in place if there is one."""
    if key in sums:
        sums[key] += batch_sum
    else:
        sums[key] = batch_sum


def _second_moments_on_device(x: torch.Tensor) -> Any:
    """Return the sum of x x^T over all axes but the last: an array for a tensor on the host, otherwise a tensor."""
    if x.device.type == "cpu":
        return second_moments(x.numpy())  # half of the symmetric product, which torch does not know
    flat = x.reshape(-1, x.shape[-1])
    product = flat.T @ flat
    return product.triu() + product.triu(1).mT  # symmetric to the last bit, as numpy's is


def on_host(values: Any) -> Array:
    """Return an array, or a tensor of any device, as an array."""
    array: Array = values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return array
