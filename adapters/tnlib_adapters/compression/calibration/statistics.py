r"""Calibration statistics of a running model over text: moments of inputs and gradients, collected block by block.

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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import Components, damped, second_moments
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.compression.progress import Progress, Stage
from tnlib_adapters.factors.model_weights import OUTSIDE, ModelWeight
from tnlib_adapters.files.process_memory import BATCH_TOKENS, release_free_memory

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.instrument.block_passes import Call, Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import WeightUse, WeightUses

    Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Statistics:
    """Calibration statistics of a text, by weight keys, in memory or read from files at every access."""

    # by input key: sums over tokens of x x^T, for rounding weighted by the gradient; of an embedding table token counts
    reads: Mapping[str, Array] = field(default_factory=dict)
    # sums of p p^T with the gradient p of a probe at the output; for an unembedding at the input, because the output is
    # as wide as the vocabulary
    slopes: Mapping[str, Array] = field(default_factory=dict)
    # Loss of the output per unit of `rounding_loss`, (1,). Of tables: the sum of |p|^2, and the numbers of tokens and
    # of texts.
    scales: Mapping[str, Array] = field(default_factory=dict)
    # Losses of the output without each component of a weight inside a block, in place of its scale, in the order of its
    # decomposition by the moments. `components` are sorted by these losses; they are not saved, because the moments
    # give them again.
    losses: Mapping[str, Array] = field(default_factory=dict)
    components: Mapping[str, Components] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the arrays, and not where they are stored, to another process."""
        return Statistics, tuple(map(dict, self._parts))

    def of_keys(self, keys: Collection[str]) -> Statistics:
        """Return the statistics of these keys."""
        return Statistics(*({key: of[key] for key in of if key in keys} for of in self._parts))

    @property
    def _parts(self) -> tuple[Mapping[str, Any], ...]:
        return self.reads, self.slopes, self.scales, self.losses, self.components

    def reads_of(self, weight: ModelWeight, rows: int) -> Array:
        """Return the input moments of a weight with so many rows: a bias is the last, of input 1."""
        moments = self.reads[weight.reads]
        return moments if len(moments) == rows else moments[:rows, :rows]  # one object is stored once


class StatisticsPasses:
    """A forward pass, and a backward pass of one probe, that collect the statistics of every group of weights.

    With `components_of`, which decomposes the weights of a block by their moments, moments are plain and the losses of
    components are measured; otherwise statistics are those for rounding. The weights of one block are in memory at a
    time if all do not fit; then, or if memory is `bounded`, inputs and gradients of its weights are in files. Streams
    that are stored are used again; with `keeps_streams` those at the inputs of blocks stay for the fit of layers.
    Gradients at the inputs of the blocks are stored beside them: "gradient-3" at block 3.
    """

    def __init__(
        self,
        model: RunningModel,
        uses: WeightUses,
        batches: Sequence[Batch],
        streams: Streams,
        progress: Progress,
        *,
        keeps_streams: bool = True,
        bounded: bool = False,
        components_of: ComponentsOf | None = None,
    ) -> None:
        from tnlib_adapters.instrument.block_passes import OuterLayers

        self._model, self._uses, self._batches, self._progress = model, uses, batches, progress
        self._outer, self._streams, self._n = OuterLayers(model), streams, len(model.layers)
        self._keeps_streams, self._components_of = keeps_streams, components_of
        in_memory = model.fits_in_memory and not bounded
        self._workspace = None if in_memory else Workspace(0, lambda: streams.folder)

    def run(self, done: Collection[int] = ()) -> Iterator[tuple[int, Statistics]]:
        """Yield every group of weights that is not `done`, blocks from the last to the first, and its statistics."""
        from tnlib_adapters.instrument.block_passes import forward
        from tnlib_adapters.instrument.weight_inputs import of_group

        inputs = [k for k in range(self._n) if self._keeps_streams or k not in done]
        calls = forward(self._outer, self._streams, self._show_forward, inputs=inputs)
        outside = {} if OUTSIDE in done else of_group(self._uses, OUTSIDE)
        sums = self._moments(outside)
        has_gradients = any(self._streams.has(f"gradient-{k}") for k in range(self._n + 1))
        if not has_gradients or any(use.predicts for use in outside.values()):
            self._at_output(sums, outside, store=not has_gradients)
        for k in reversed(range(self._n)):
            if k not in done:
                yield k, self._of_block(k, calls)
            self._streams.remove(f"gradient-{k + 1}")
            if not self._keeps_streams:
                self._streams.remove(f"stream-{k}")
            release_free_memory()
        if outside:
            self._at_input(sums, outside)
            yield OUTSIDE, sums.finish()
        self._streams.remove("gradient-0")
        self._show_backward(OUTSIDE - 1, 0)

    def _moments(self, uses: WeightUses) -> GroupMoments:
        return GroupMoments(self._model, uses, self._batches, self._workspace, weighted=self._components_of is None)

    def _show_forward(self, k: int, b: int) -> None:
        """Show that a batch enters a block in the forward pass."""
        batches = self._streams.batches
        stage = Stage("running the model", f"block {k + 1} of {self._n}")
        self._progress(stage, k * len(batches) + b + 1, self._n * len(batches))

    def _show_backward(self, group: int, b: int) -> None:
        """Show that a batch enters the backward pass: of a block, last to first, or of the embeddings."""
        total, done = (self._n + 1) * len(self._batches), (self._n - 1 - group) * len(self._batches) + b
        part = "embeddings" if group < 0 else f"block {group + 1} of {self._n}"
        self._progress(Stage("collecting statistics", part if done < total else ""), done, total)

    def _at_output(self, sums: GroupMoments, uses: WeightUses, *, store: bool) -> None:
        """Add inputs and gradients of unembeddings, and `store` the gradients at the output of the last block."""
        import torch

        from tnlib_adapters.instrument.weight_inputs import observe_output

        for b, batch in enumerate(self._batches):
            x = self._streams.read(f"stream-{self._n}", b)
            generator = torch.Generator().manual_seed(2 * b)  # by batch, so that resuming is reproducible
            reads, slopes, gradient = observe_output(self._outer, x, batch, uses, generator)
            sums.add(batch, reads, slopes)
            del slopes  # at all logits, which would stay in memory while the next batch runs
            if store:
                self._streams.write(f"gradient-{self._n}", b, gradient)
        if store:
            self._streams.finish(f"gradient-{self._n}")

    def _of_block(self, k: int, calls: Sequence[Sequence[Call]]) -> Statistics:
        """Return the statistics of a block, and store the gradients at its input."""
        from tnlib_adapters.instrument.weight_inputs import observe_block, of_group

        uses = of_group(self._uses, k)
        sums = self._moments(uses)
        for b, batch in enumerate(self._batches):
            self._show_backward(k, b)
            x, gradient = self._streams.read(f"stream-{k}", b), self._streams.read(f"gradient-{k + 1}", b)
            reads, slopes, at_stream = observe_block(self._model, k, x, calls[b][k], batch, uses, gradient)
            self._streams.write(f"gradient-{k}", b, at_stream)
            sums.add(batch, reads, slopes)
            del x, gradient, reads, slopes, at_stream  # those of the last batch, while weights are decomposed
        self._streams.finish(f"gradient-{k}")
        statistics = sums.finish()
        if self._components_of is None:
            return replace(statistics, scales=sums.scales(statistics))
        components = dict(self._components_of(k, statistics))
        losses = sums.losses(components)
        ordered = {key: components.pop(key).with_losses(losses[key]) for key in list(components)}  # one copy at a time
        return replace(statistics, losses=losses, components=ordered)

    def _at_input(self, sums: GroupMoments, uses: WeightUses) -> None:
        """Add inputs and gradients of tables of embeddings."""
        from tnlib_adapters.instrument.weight_inputs import observe_input

        for b, batch in enumerate(self._batches):
            self._show_backward(OUTSIDE, b)
            reads, slopes, _ = observe_input(self._outer, batch, uses, self._streams.read("gradient-0", b))
            sums.add(batch, reads, slopes)


ComponentsOf = Callable[[int, Statistics], Mapping[str, Components]]  # block and moments -> components by key

_SAMPLE = 4096  # tokens of the texts on which losses are compared with rounding costs
_COMPONENT_SAMPLE = 8192  # tokens on which losses of components are measured: of many numbers, more tokens
_DAMPED = 0.01  # of the mean moment, added before an inverse is applied


class GroupMoments:
    """Sums over batches of the moments of one group of weights, `weighted` by gradients or plain, and a sample.

    With a `workspace`, inputs and gradients are in its files.
    """

    def __init__(
        self,
        model: RunningModel,
        uses: WeightUses,
        batches: Sequence[Batch],
        workspace: Workspace | None,
        *,
        weighted: bool,
    ) -> None:
        self._model, self._uses, self._batches, self._weighted = model, uses, batches, weighted
        self._counts, self._reads, self._slopes = dict[str, Array](), MomentSums(workspace), MomentSums(workspace)
        self._energies, self._workspace = dict[str, float](), workspace
        # inputs by their keys, and gradients by those of the weights
        self._sample: list[tuple[Batch, Tensors | StoredArrays, Tensors | StoredArrays]] = []

    def add(self, batch: Batch, reads: Tensors, slopes: Tensors) -> None:
        """Add inputs and gradients of a batch, those of all weights at once or of one kind after the other."""
        weights: dict[str, torch.Tensor] = {}
        for key, slope in slopes.items():
            use = self._uses[key]
            squares = slope.norm(dim=-1).square()  # b t, without an array as large as the logits
            add_to(self._energies, key, float(squares.sum()))
            if use.predicts:
                self._model.load(use.group)
                slope = slope @ use.module.get_parameter("weight").float()  # at the input: V is too wide for moments
            elif self._weighted and not use.is_table:
                add_to(weights, use.reads, squares)
            self._slopes.add(key, slope)
        use_of = {use.reads: use for use in self._uses.values()}
        for key, x in reads.items():
            if use_of[key].is_table:
                n_rows = len(use_of[key].module.get_parameter("weight"))
                ids = x[x >= 0].cpu().numpy()
                add_to(self._counts, key, np.bincount(ids, minlength=n_rows).astype(np.float32))
            else:
                self._reads.add(key, x * weights[key].sqrt()[..., None] if key in weights else x)
        n_sample = _SAMPLE if self._weighted else _COMPONENT_SAMPLE
        if sum(batch.n_tokens for batch, *_ in self._sample) < n_sample:
            of_blocks = {key: slope for key, slope in slopes.items() if self._is_inside(self._uses[key])}
            read = {use.reads: reads[use.reads] for use in map(self._uses.__getitem__, of_blocks)}
            self._sample.append((batch, self._kept(read), self._kept(of_blocks)))

    def finish(self) -> Statistics:
        """Return moments of inputs and of gradients, and the scales of weights outside the blocks."""
        reads, slopes, scales = self._reads.finish(), self._slopes.finish(), dict[str, Array]()
        reads.add(self._counts)
        n_tokens = sum(batch.n_tokens for batch in self._batches)
        n_texts = n_tokens if self._model.predicts else sum(len(batch.ids) for batch in self._batches)
        for key, use in self._uses.items():
            if not self._is_inside(use):
                scales[key] = np.array([self._energies[key], n_tokens, n_texts])
        return Statistics(reads, slopes, scales)

    def _kept(self, tensors: Tensors) -> Tensors | StoredArrays:
        """Return tensors of the sample, in files of the workspace if there is one."""
        if self._workspace is None:
            return tensors
        stored = StoredArrays(self._workspace)
        stored.add({key: on_host(x) for key, x in tensors.items()})
        return stored

    def _is_inside(self, use: WeightUse) -> bool:
        return not (use.predicts or use.is_table)

    @property
    def _n_sampled(self) -> int:
        """Tokens of the sample of a language model, texts of other models."""
        return sum(batch.n_tokens if self._model.predicts else len(batch.ids) for batch, *_ in self._sample)

    def losses(self, components: Mapping[str, Components]) -> dict[str, Array]:
        """Return the losses without each component of the weights inside a block, from the sample."""
        import torch

        losses = dict[str, Array]()
        for key, of_weight in components.items():
            factors = (a.astype(np.float32, copy=False) for a in (of_weight.left, of_weight.right))
            left, right = (torch.from_numpy(a).to(self._model.device) for a in factors)
            total = torch.zeros(len(of_weight.losses), dtype=torch.float64)
            for x, p in zip(self._inputs(self._uses[key].reads), self._gradients(key), strict=True):
                products = (x[..., : len(left)] @ left) * (p @ right.mT)  # b t c
                total += products.sum(1).cpu().double().square().sum(0)
            losses[key] = (total / self._n_sampled).numpy()
        return losses

    def scales(self, statistics: Statistics) -> dict[str, Array]:
        """Return the loss per unit of the rounding cost of the weights inside a block, from the sample."""
        inside = {key: use for key, use in self._uses.items() if self._is_inside(use)}
        scales = dict[str, Array]()
        for read, use in {use.reads: use for use in inside.values()}.items():
            moments = statistics.reads[read]
            n_rows = len(moments) - (use.projection is not None and use.projection.name != "o")  # without bias
            inputs = _whitened((x[..., :n_rows] for x in self._inputs(read)), moments[:n_rows, :n_rows])
            for key in (key for key, use in inside.items() if use.reads == read):
                outputs = _whitened(self._gradients(key), statistics.slopes[key])
                squares = (((x @ x.mT) * (p @ p.mT)).sum() for x, p in zip(inputs, outputs, strict=True))
                scales[key] = np.array([sum(map(float, squares)) / (n_rows * outputs[0].shape[-1] * self._n_sampled)])
        return scales

    def _inputs(self, read: str) -> Iterator[torch.Tensor]:
        return (self._on_device(inputs[read]) for _, inputs, _ in self._sample)

    def _gradients(self, key: str) -> Iterator[torch.Tensor]:
        return (self._on_device(gradients[key]) for *_, gradients in self._sample)

    def _on_device(self, values: torch.Tensor | Array) -> torch.Tensor:
        import torch

        return torch.from_numpy(values).to(self._model.device) if isinstance(values, np.ndarray) else values


def _whitened(batches: Iterable[torch.Tensor], moments: Array) -> list[torch.Tensor]:
    """Return x L^-T for batches of x (b, t, m), with moments L L^T."""
    import torch

    raised = damped(moments.astype(np.float64), _DAMPED) if moments.any() else np.eye(len(moments))
    upper = torch.from_numpy(np.linalg.cholesky(raised).T.astype(np.float32))  # well conditioned, as they are damped

    def solution(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)  # a solution for each text takes thirty times as long
        solved: torch.Tensor = torch.linalg.solve_triangular(upper.to(x.device), rows, upper=True, left=False)
        return solved.view(x.shape)

    return [solution(x) for x in batches]


class MomentSums:
    """Second moments by key, summed over batches. Short batches are put together: each product passes over the sum.

    With a workspace the rows are in its files until `finish`.
    """

    def __init__(self, workspace: Workspace | None) -> None:
        self._workspace = workspace
        self._sums: dict[str, Any] = {}  # arrays on the host, tensors on another device
        self._waiting: dict[str, list[torch.Tensor]] = {}
        self._stored: dict[str, StoredArrays] = {}  # rows by their number

    def add(self, key: str, x: torch.Tensor) -> None:
        """Add x (..., width)."""
        rows = x.reshape(-1, x.shape[-1])
        waiting = self._waiting.setdefault(key, [])
        if sum(map(len, waiting)) + len(rows) > BATCH_TOKENS:
            self._put_together(key)
        self._waiting[key].append(rows)

    def finish(self) -> StoredArrays:
        """Return the sums, in files of the workspace if there is one."""
        import torch

        devices = {key: waiting[-1].device for key, waiting in self._waiting.items()}
        for key in self._waiting:
            self._put_together(key)
        sums = StoredArrays(self._workspace or Workspace())
        for key in list(self._stored):
            for rows in self._stored.pop(key).values():
                add_to(self._sums, key, _second_moments_on_device(torch.from_numpy(rows).to(devices[key])))
            sums.add({key: on_host(self._sums.pop(key))})
        sums.add({key: on_host(total) for key, total in self._sums.items()})
        return sums

    def _put_together(self, key: str) -> None:
        import torch

        if waiting := self._waiting[key]:
            rows = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            if self._workspace is None:
                add_to(self._sums, key, _second_moments_on_device(rows))
            else:
                stored = self._stored.setdefault(key, StoredArrays(self._workspace))
                stored.add({str(len(stored)): on_host(rows)})
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
