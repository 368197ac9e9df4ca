"""Ablation of edges: a language model with a gate on every edge of its residual stream, and what replaces its writers.

Edges lead from a writer to a reader of the residual stream:

    writers   tokens, positions, every head, the output bias of every attention layer, every feed-forward layer
    readers   queries, keys and values of every head, every feed-forward layer, and the logits

A reader r receives sum_w g_rw x_w + (1 - g_rw) c_w over the preceding writers w, with c_w the value that stands for an
ablated writer: zero, its mean, or its value on other tokens. Norms, patterns and feed-forward layers are computed anew
from what is received. With all gates at 1 this is the original model. Norms on the stream after a block, as in BERT,
are applied to the stream of every reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import check_choice
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.discovery.gated_layers import GatedLayer, LayerValues, Reader, gated_layers
from tnlib_adapters.circuits.discovery.target_loss import Metric, Targets, differentiated, targets_of
from tnlib_adapters.reference.embedding import TokenEmbedding
from tnlib_adapters.reference.weights import Weights, as_weights

AblationKind = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False)
class Ablation:
    """Ablation of edges and metric of its effect, for `find_circuit` and `edge_effects`.

    Parameters
    ----------
    kind
        Value that replaces an ablated writer. "zero": nothing. "mean": the mean of the writer over all given
        tokens. "resample": the output of the writer on other tokens.
    metric
        "loss": the mean cross-entropy of the target tokens. "kl": the mean KL divergence of the predictions from those
        of the whole model. A function of the logits (targets, vocab) and the target tokens (targets,) that returns a
        number, lower for better, such as `LogitDifference`; for gradients it gets tensors of torch.
    corrupted
        For "resample", the other tokens or texts, of the shape of the given ones. None: every sequence receives the
        outputs of the next sequence of the batch.

    Raises
    ------
    ArgumentError
        If a name is unknown, or `corrupted` is given for another kind than "resample".

    References
    ----------
    F. Zhang and N. Nanda, "Towards Best Practices of Activation Patching in Language Models" (2024).

    Examples
    --------
    >>> Ablation("resample", metric="kl", corrupted=[5, 6, 7, 9])  # for tokens [5, 6, 7, 8]
    Ablation(kind='resample', metric='kl', corrupted=[5, 6, 7, 9])
    """

    kind: AblationKind = "zero"
    metric: Metric = "loss"
    corrupted: Any = None

    def __post_init__(self) -> None:
        check_choice("Ablation", "kind", self.kind, get_args(AblationKind))
        if not callable(self.metric):
            check_choice("Ablation", "metric", self.metric, ("loss", "kl"))
        if self.corrupted is not None and self.kind != "resample":
            raise ArgumentError(
                f"Ablation: corrupted must be None for kind={self.kind!r}, got other tokens; pass kind='resample'."
            )

    def corrupted_tokens(self, function: str, embedding: TokenEmbedding, tokens: Array) -> Array:
        """Return the tokens (batch, n) of the other run."""
        if self.corrupted is None:
            if len(tokens) < 2:
                raise ArgumentError(
                    f"{function}: tokens must hold at least two sequences for kind='resample', got {len(tokens)}; pass "
                    "more, or Ablation('resample', corrupted=tokens)."
                )
            return np.roll(tokens, -1, axis=0)
        other = embedding.check(function, self.corrupted, None, "corrupted")
        if other.shape != tokens.shape:
            raise ArgumentError(
                f"{function}: corrupted must have the shape of tokens, {tokens.shape}, got {other.shape}; align them."
            )
        return other


def as_ablation(function: str, ablation: Any) -> Ablation:
    """Return an `Ablation`, also for the name of its kind."""
    if isinstance(ablation, Ablation):
        return ablation
    if not isinstance(ablation, str):
        raise ArgumentTypeError(
            f"{function}: ablation must be a name or an Ablation, got {type(ablation).__name__}; pass 'zero'."
        )
    check_choice(function, "ablation", ablation, get_args(AblationKind))
    return Ablation(ablation)  # type: ignore[arg-type]


_BIAS = ".bias"


@dataclass(frozen=True, eq=False)
class _Pass:
    """A forward pass: gates, writers less the values that replace them, values of the layers, the final stream."""

    gates: Array  # reader writer
    delta: Array  # writer b n d
    layers: list[LayerValues]
    final: Array  # b n d


class GatedModel:
    """A language model with gates (edges,) between writers and readers of its stream; used by `find_circuit`.

    `names` are the edges, "writer -> reader", in layer order.
    """

    def __init__(
        self,
        model: Checkpoint | Weights,
        tokens: Any,
        mask: Array | None,
        function: str,
        ablation: Ablation | None = None,
    ) -> None:
        weights = as_weights(function, model)
        self.ablation = Ablation() if ablation is None else ablation
        self.targets: Targets = targets_of(weights, tokens, mask, function, self.ablation.metric)
        embedding: TokenEmbedding = weights.embedding  # type: ignore[assignment]
        embedded = embedding.parts_of_stream(self.targets.tokens)
        self._embedded = np.stack(list(embedded.values()))  # writer b n d
        self.layers, self._segments, self._logits = gated_layers(weights, len(embedded))
        self.writers = (*embedded, *(name for layer in self.layers for name in layer.writer_names))
        readers = [*(reader for layer in self.layers for reader in layer.readers), ("logits", "logits")]
        self.readers, self._components = zip(*readers, strict=True)  # of every reader, the component that it belongs to
        self._open = self._open_gates()
        self._replaced: Array | None = None
        self._replaced = self._replacements(function, embedding)
        self.edges = np.array(list(self._edges()), dtype=np.int64).reshape(-1, 2)  # edge (reader, writer)
        self.names = tuple(f"{self.writers[w]} -> {self.readers[r]}" for r, w in self.edges)
        self._latest: tuple[Array, _Pass] | None = None
        if self.ablation.metric == "kl":
            self.targets = self.targets.compared_with(self._pass(self._open).final)

    def loss(self, gates: Array) -> float:
        """Return the loss with gates (edges,)."""
        return self.targets.loss(self._forward(gates).final)

    def losses_without(self, gates: Array, edges: Array) -> Array:
        """Return the loss with each of `edges` removed, one at a time; only downstream values are recomputed."""
        return self.losses_without_groups(gates, [np.array([edge]) for edge in edges])

    def losses_without_groups(self, gates: Array, groups: Iterable[Array]) -> Array:
        """Return the loss with the edges of each group removed together; only downstream values are recomputed."""
        values = self._forward(gates)
        scratch = values.delta.copy()
        return np.array([self._loss_without(group, values, scratch) for group in groups])

    def first_order(self, gates: Array, *, by_position: bool = False) -> Array:
        """Return the first-order increase of the loss from closing each gate, (edges,): minus the derivative.

        With `by_position`, (edges, n): the parts of the positions of the reader.
        """
        values = self._pass(self._matrix(gates), run=GatedLayer.differentiate)
        return self._slopes(values, values.delta, by_position=by_position)

    def first_order_between(self, fraction: float, *, by_position: bool = False) -> Array:
        """Return first-order effects (edges,) with the gradients of a run between the replaced and the given values.

        The model runs on embeddings that are this fraction of the way from the replaced ones to those of the tokens.
        For "zero" all gates are at this fraction instead: norms do not see the scale of an embedding.
        """
        if self._replaced is None:
            return self.first_order(np.full(len(self.edges), fraction), by_position=by_position)
        replaced = self._replaced[: len(self._embedded)]
        embedded = (replaced + fraction * (self._embedded - replaced)).astype(self._embedded.dtype)
        delta = self._forward(np.ones(len(self.edges))).delta
        values = self._pass(self._open, embedded, GatedLayer.differentiate)
        return self._slopes(values, delta, by_position=by_position)

    def _slopes(self, values: _Pass, delta: Array, *, by_position: bool = False) -> Array:
        """Return minus the derivatives of the loss by all gates (edges,), for writers less their replacements.

        With `by_position`, (edges, n): by gates of every position of the reader.
        """
        positions = [delta.shape[2]] if by_position else []
        slopes, grads = np.zeros([*values.gates.shape, *positions], delta.dtype), np.zeros_like(delta)
        self._read_adjoint(values, delta, self._logits, self.targets.slope(values.final)[None], slopes, grads)
        for layer, layer_values in zip(reversed(self.layers), reversed(values.layers), strict=True):
            if layer_values.pull_back is not None:
                grad = layer_values.pull_back(grads[layer.writers])
                self._read_adjoint(values, delta, layer.reader, grad, slopes, grads)
        return -slopes[tuple(self.edges.T)]

    def connected(self, gates: Array, *, from_sources: bool) -> Array:
        """Return gates (edges,) without the edges from which no path leads to the logits, which changes nothing.

        With `from_sources`, without those that no path from tokens, positions or a bias reaches either.
        """
        pairs = [(self.writers[w], self._components[r]) for r, w in self.edges]
        kept = gates.astype(bool)
        useful, reached = {"logits"}, {*self.writers} - {*self._components}
        for k in reversed(range(len(pairs))):  # readers of later layers come later
            if kept[k] and pairs[k][1] in useful:
                useful.add(pairs[k][0])
        for k, (writer, component) in enumerate(pairs):
            if kept[k] and writer in reached:
                reached.add(component)
        for k, (writer, component) in enumerate(pairs):
            kept[k] &= component in useful and (writer in reached or not from_sources)
        return np.where(kept, gates, 0.0)

    # ---------------------------------------------------------------------------------------------------------- edges

    def _open_gates(self) -> Array:
        """Return the gates (reader, writer) of the model itself: 1 for the writers before a reader."""
        gates = np.zeros((len(self.readers), len(self.writers)), self._embedded.dtype)
        for reader in (*(layer.reader for layer in self.layers), self._logits):
            gates[reader.rows, : reader.n_before] = 1
        return gates

    def _replacements(self, function: str, embedding: TokenEmbedding) -> Array | None:
        """Return the values (writer, b, n, d) of ablated writers, (writer, 1, 1, d) for means, None for zero."""
        if self.ablation.kind == "zero":
            return None
        if self.ablation.kind == "mean":
            return np.asarray(self._pass(self._open).delta.mean(axis=(1, 2), keepdims=True))
        tokens = self.ablation.corrupted_tokens(function, embedding, self.targets.tokens)
        return self._pass(self._open, np.stack(list(embedding.parts_of_stream(tokens).values()))).delta

    def _edges(self) -> Iterator[tuple[int, int]]:
        """Yield (reader, writer) by layer, then writer, then head and side."""
        for layer in self.layers:
            yield from (
                (int(r), w) for w in range(layer.reader.n_before) if self._is_removable(w) for r in layer.rows_by_head
            )
        yield from ((self._logits.rows.start, w) for w in range(len(self.writers)) if self._is_removable(w))

    def _is_removable(self, writer: int) -> bool:
        """Test if an ablated writer has another value: a constant has not, unless it is replaced by zero."""
        if self._replaced is None:
            return True
        if writer < len(self._embedded):
            vectors = self._embedded[writer]  # a mean of equal vectors may differ from them by roundoff
            other = vectors[:1, :1] if self.ablation.kind == "mean" else self._replaced[writer]
            return bool(np.any(vectors != other))
        return not self.writers[writer].endswith(_BIAS)

    def _matrix(self, gates: Array) -> Array:
        matrix = self._open.copy()
        matrix[tuple(self.edges.T)] = gates
        return matrix

    # -------------------------------------------------------------------------------------------------------- forward

    def _forward(self, gates: Array) -> _Pass:
        """Return the forward pass; the latest is cached because a search evaluates the same gates repeatedly."""
        if self._latest is None or not np.array_equal(self._latest[0], gates):
            self._latest = gates.copy(), self._pass(self._matrix(gates))
        return self._latest[1]

    def _pass(
        self,
        gates: Array,
        embedded: Array | None = None,
        run: Callable[[GatedLayer, Array], LayerValues] = GatedLayer.run,
    ) -> _Pass:
        start = self._embedded if embedded is None else embedded
        delta, layers = np.zeros((len(self.writers), *start.shape[1:]), start.dtype), []
        self._store(delta, slice(0, len(start)), start)
        for layer in self.layers:
            layers.append(run(layer, self._streams(gates, layer.reader, delta)[-1]))
            self._store(delta, layer.writers, layers[-1].written)
        return _Pass(gates, delta, layers, self._streams(gates, self._logits, delta)[-1][0])

    def _store(self, delta: Array, writers: slice, written: Array) -> None:
        delta[writers] = written if self._replaced is None else written - self._replaced[writers]

    def _streams(self, gates: Array, reader: Reader, delta: Array) -> list[Array]:
        """Return the stream (reader, b, n, d) of some readers before every norm on it, and last what they receive."""
        streams: list[Array] = []
        for k, segment in enumerate(self._segments[: reader.segment + 1]):
            some = segment.before(reader.n_before)
            stream = np.tensordot(gates[reader.rows, some], delta[some], 1)  # reader [w] b n d
            if self._replaced is not None:
                stream += self._replaced[some].sum(axis=0)  # b n d
            if k:
                stream += self._segments[k - 1].normed(streams[-1])
            streams.append(stream)
        return streams

    def _loss_without(self, edges: Array, values: _Pass, scratch: Array) -> float:
        """Return the loss without some edges; `scratch` equals the writers of the pass, before and after."""
        (rows, writers), gates = self.edges[edges].T, values.gates.copy()
        gates[rows, writers] = 0
        later = [k for k, layer in enumerate(self.layers) if rows.min() < layer.reader.rows.stop]
        for k in later:
            layer = self.layers[k]
            if k == later[0] and len(rows) == 1:
                read = self._streams(gates, layer.reader.single(int(rows[0])), scratch)[-1]
                written = layer.run_head(values.layers[k], int(rows[0]), read)
            else:
                written = layer.run(self._streams(gates, layer.reader.of(gates), scratch)[-1]).written
            self._store(scratch, layer.writers, written)
        loss = self.targets.loss(self._streams(gates, self._logits, scratch)[-1][0])
        start = self.layers[later[0]].writers.start if later else len(scratch)
        scratch[start:] = values.delta[start:]
        return loss

    # ------------------------------------------------------------------------------------------------------- backward

    def _read_adjoint(
        self, values: _Pass, delta: Array, reader: Reader, grad: Array, slopes: Array, grads: Array
    ) -> None:
        """Add to `slopes` and `grads` the gradients of gates and writers, from those of what readers receive."""
        streams = self._streams(values.gates, reader, values.delta) if reader.segment else []
        for k in range(reader.segment, -1, -1):
            if k < reader.segment:
                grad = differentiated(self._segments[k].normed, streams[k])[1](grad)
            some = self._segments[k].before(reader.n_before)
            if slopes.ndim == 2:
                slopes[reader.rows, some] += np.tensordot(grad, delta[some], ((1, 2, 3), (1, 2, 3)))
            else:
                for n in range(slopes.shape[2]):
                    slopes[reader.rows, some, n] += np.tensordot(grad[:, :, n], delta[some, :, n], ((1, 2), (1, 2)))
            grads[some] += np.tensordot(values.gates[reader.rows, some], grad, ((0,), (0,)))  # w [reader] b n d
