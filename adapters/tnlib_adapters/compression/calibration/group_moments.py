r"""Moments of one group of weights over a text, and what errors of the weights cost the output, in one unit for all.

A changed weight W - E changes a scalar L of the output by sum_t x_t E p_t, with inputs x_t and gradients p_t at the
output. The expected square of one term is tr(P E^T A E) with A = E[x x^T] and P = E[p p^T], if x and p are independent.
They are not: tokens with large gradients matter more, so for rounding A is the sum of |p_t|^2 x_t x_t^T.

Errors of error-compensating rounding are nearly white in the metric of both moments (see `compensated_rounding`), so
the mean square of the change, terms of different tokens included, is tr(P E^T A E) times

    sum_s |A^-1/2 (sum_{t in s} x_t p_t^T) P^-1/2|^2 / (m n)

with the sum over texts s of a sample, divided by the number of texts, or of tokens for a language model. This brings
weights of all kinds to one unit.

What low-rank factors leave out is not white. There A is the plain sum, and the loss of a component l r^T of a weight is
measured on the sample: the sum over texts s of (sum_{t in s} x_t l r^T p_t)^2, divided as above.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from tnlib._typing import Array
from tnlib_adapters.compression.calibration.statistics import Statistics
from tnlib_adapters.compression.methods.components import Components, damped, second_moments
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, StoredObjects, Workspace
from tnlib_adapters.files.process_memory import BATCH_TOKENS
from tnlib_adapters.instrument.running_model import Batch, RunningModel
from tnlib_adapters.instrument.weight_inputs import WeightUses

Tensors = Mapping[str, torch.Tensor]

_DAMPED = 0.01  # of the mean moment, added before an inverse is applied


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


class GroupMoments:
    """Sums over batches of the moments of one group of weights, and inputs and gradients of the first batches.

    These, the sample, are in the workspace; so are all inputs and gradients if the model does not fit in memory.
    """

    n_sample: ClassVar[int]  # tokens of the sample, or a few more

    def __init__(self, model: RunningModel, batches: Sequence[Batch], workspace: Workspace, uses: WeightUses) -> None:
        of_sums = None if model.fits_in_memory else workspace
        self._model, self._uses, self._batches = model, uses, batches
        self._inside = {key: use for key, use in uses.items() if not (use.predicts or use.is_table)}
        self._counts, self._energies = dict[str, Array](), dict[str, float]()
        self._reads, self._slopes = (MomentSums(of_sums, model.device) for _ in range(2))
        self._sample: list[Batch] = []
        # of the sample: inputs by their keys, gradients by those of the weights
        self._inputs, self._gradients = (StoredTensors(workspace, model.device) for _ in range(2))

    def add(self, batch: Batch, reads: Tensors, slopes: Tensors) -> None:
        """Add inputs and gradients of a batch, those of all weights at once or of one kind after the other."""
        for key, slope in slopes.items():
            use = self._uses[key]
            if key not in self._inside:
                add_to(self._energies, key, float(_squares(slope).sum()))
            if use.predicts:
                self._model.load(use.group)
                slope = slope @ use.module.get_parameter("weight").float()  # at the input: V is too wide for moments
            self._slopes.add(key, slope)
        tables = {use.reads: use for use in self._uses.values() if use.is_table}
        for key, x in self._weighed(reads, slopes):
            if key in tables:
                n_rows = len(tables[key].module.get_parameter("weight"))
                ids = x[x >= 0].cpu().numpy()
                add_to(self._counts, key, np.bincount(ids, minlength=n_rows).astype(np.float32))
            else:
                self._reads.add(key, x)
        if self._inside and sum(sampled.n_tokens for sampled in self._sample) < self.n_sample:
            self._sample.append(batch)
            for key in dict.fromkeys(use.reads for use in self._inside.values()):
                self._inputs.add(key, reads[key])
            for key in self._inside:
                self._gradients.add(key, slopes[key])

    def finish(self) -> Statistics:
        """Return moments of inputs and of gradients, and the scales of weights outside the blocks."""
        reads, slopes, scales = self._reads.finish(), self._slopes.finish(), dict[str, Array]()
        reads.add(self._counts)
        n_tokens = sum(batch.n_tokens for batch in self._batches)
        n_texts = n_tokens if self._model.predicts else sum(len(batch.ids) for batch in self._batches)
        for key, energy in self._energies.items():
            scales[key] = np.array([energy, n_tokens, n_texts])
        return Statistics(reads, slopes, scales)

    def _weighed(self, reads: Tensors, slopes: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the inputs whose moments are summed."""
        yield from reads.items()

    @property
    def _n_sampled(self) -> int:
        """Tokens of the sample of a language model, texts of other models."""
        return sum(batch.n_tokens if self._model.predicts else len(batch.ids) for batch in self._sample)


class RoundingMoments(GroupMoments):
    """Moments of inputs weighted by their gradients, and the scales of rounding losses."""

    n_sample = 4096

    def finish(self) -> Statistics:
        """Return the moments, and the scales of all weights."""
        statistics = super().finish()
        return replace(statistics, scales={**statistics.scales, **self._scales(statistics)})

    def _weighed(self, reads: Tensors, slopes: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        weights = dict[str, Any]()
        for key, use in self._inside.items():
            add_to(weights, use.reads, _squares(slopes[key]))
        for key, x in reads.items():
            yield key, x * weights[key].sqrt()[..., None] if key in weights else x

    def _scales(self, statistics: Statistics) -> dict[str, Array]:
        """Return the loss per unit of the rounding cost of the weights inside a block, from the sample."""
        scales = dict[str, Array]()
        for read, use in {use.reads: use for use in self._inside.values()}.items():
            moments = statistics.reads[read]
            n_rows = len(moments) - (use.projection is not None and use.projection.name != "o")  # without bias
            inputs = _whitened((x[..., :n_rows] for x in self._inputs.of(read)), moments[:n_rows, :n_rows])
            for key in (key for key, use in self._inside.items() if use.reads == read):
                outputs = _whitened(self._gradients.of(key), statistics.slopes[key])
                squares = (((x @ x.mT) * (p @ p.mT)).sum() for x, p in zip(inputs, outputs, strict=True))
                scales[key] = np.array([sum(map(float, squares)) / (n_rows * outputs[0].shape[-1] * self._n_sampled)])
        return scales


# keys of weights in one block, and their moments -> each key and its components
Decompose = Callable[[Collection[str], Statistics], Iterable[tuple[str, Components]]]


class ComponentMoments(GroupMoments):
    """Plain moments, the components of weights inside a block by these, and their measured losses."""

    n_sample = 8192

    def __init__(
        self,
        decompose: Decompose,
        model: RunningModel,
        batches: Sequence[Batch],
        workspace: Workspace,
        uses: WeightUses,
    ) -> None:
        super().__init__(model, batches, workspace, uses)
        self._decompose, self._workspace = decompose, workspace

    def finish(self) -> Statistics:
        """Return the moments, the components of weights inside a block and their losses, and scales of the others."""
        statistics = super().finish()
        losses, ordered = dict[str, Array](), StoredObjects(self._workspace)
        for key, components in self._decompose(self._inside, statistics):
            losses[key] = self._losses(key, components)
            ordered.add(key, components.with_losses(losses[key]))
            del components  # before the next weight is decomposed
        return replace(statistics, losses=losses, components=ordered)

    def _losses(self, key: str, components: Components) -> Array:
        """Return the losses of the output without each component of a weight, from the sample."""
        factors = (a.astype(np.float32, copy=False) for a in (components.left, components.right))
        left, right = (torch.from_numpy(a).to(self._model.device) for a in factors)
        total = torch.zeros(len(components.losses), dtype=torch.float64)
        for x, p in zip(self._inputs.of(self._uses[key].reads), self._gradients.of(key), strict=True):
            products = (x[..., : len(left)] @ left) * (p @ right.mT)  # b t c
            total += products.sum(1).cpu().double().square().sum(0)
        return (total / self._n_sampled).numpy()


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Return |x|^2 along the last axis, without an array as large as the logits."""
    squares: torch.Tensor = x.norm(dim=-1).square()
    return squares


def _whitened(batches: Iterable[torch.Tensor], moments: Array) -> list[torch.Tensor]:
    """Return x L^-T for batches of x (b, t, m), with moments L L^T."""
    raised = damped(moments.astype(np.float64), _DAMPED) if moments.any() else np.eye(len(moments))
    upper = torch.from_numpy(np.linalg.cholesky(raised).T.astype(np.float32))  # well conditioned, as they are damped

    def solution(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)  # a solution for each text takes thirty times as long
        solved: torch.Tensor = torch.linalg.solve_triangular(upper.to(x.device), rows, upper=True, left=False)
        return solved.view(x.shape)

    return [solution(x) for x in batches]
