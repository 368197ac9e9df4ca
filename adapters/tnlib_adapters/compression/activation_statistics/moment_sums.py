"""Second moments of inputs and gradients, summed over the batches of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import second_moments
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.files.process_memory import BATCH_TOKENS

if TYPE_CHECKING:
    import torch


class MomentSums:
    """Second moments by key, summed over batches. Short batches are put together: each product passes over the sum.

    With a workspace the rows are in its files until `finish`.
    """

    def __init__(self, workspace: Workspace | None) -> None:
        self._workspace = workspace
        self._sums: dict[str, Any] = {}  # arrays on the host, tensors on another device
        self._waiting: dict[str, list[torch.Tensor]] = {}
        self._stored: dict[str, list[_StoredRows]] = {}

    def add(self, key: str, x: torch.Tensor) -> None:
        """Add x (..., width)."""
        rows = x.reshape(-1, x.shape[-1])
        waiting = self._waiting.setdefault(key, [])
        if sum(map(len, waiting)) + len(rows) > BATCH_TOKENS:
            self._put_together(key)
        self._waiting[key].append(rows)

    def finish(self) -> StoredArrays:
        """Return the sums, in files of the workspace if there is one."""
        for key in self._waiting:
            self._put_together(key)
        sums = StoredArrays(self._workspace or Workspace())
        for key in list(self._stored):
            for rows in self._stored.pop(key):
                add_to(self._sums, key, second_moments_on_device(rows.read()))
            sums.add({key: on_host(self._sums.pop(key))})
        sums.add({key: on_host(total) for key, total in self._sums.items()})
        return sums

    def _put_together(self, key: str) -> None:
        import torch

        if waiting := self._waiting[key]:
            rows = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            if self._workspace is None:
                add_to(self._sums, key, second_moments_on_device(rows))
            else:
                self._stored.setdefault(key, []).append(_StoredRows(self._workspace, rows))
        self._waiting[key] = []


class _StoredRows:
    """Rows of a tensor in a file."""

    def __init__(self, workspace: Workspace, rows: torch.Tensor) -> None:
        self._device, self._stored = rows.device, StoredArrays(workspace)
        self._stored.add({"rows": on_host(rows)})

    def read(self) -> torch.Tensor:
        """Return the rows on their device."""
        import torch

        return torch.from_numpy(self._stored["rows"]).to(self._device)


def add_to(sums: dict[str, Any], key: str, batch_sum: Any) -> None:
    """Add to the sum of this key, in place if there is one."""
    if key in sums:
        sums[key] += batch_sum
    else:
        sums[key] = batch_sum


def second_moments_on_device(x: torch.Tensor) -> Any:
    """Return the sum of x x^T over all axes but the last: an array for a tensor on the host, otherwise a tensor."""
    if x.device.type == "cpu":
        return second_moments(x.numpy())  # half of the symmetric product, which torch does not know
    flat = x.reshape(-1, x.shape[-1])
    return flat.T @ flat


def on_host(values: Any) -> Array:
    """Return an array, or a tensor of any device, as an array."""
    array: Array = values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return array
