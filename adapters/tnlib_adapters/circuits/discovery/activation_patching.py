r"""Activation patching: what one component at one position carries, by its value from another run.

The model runs on corrupted tokens, and one activation at one position takes the value of the run on clean tokens. The
recovered share of the metric m is (m(patched) - m(corrupted)) / (m(clean) - m(corrupted)). Activations are the stream
before a block, the output of a layer, or the output of one head. The positions of an activation are one batch, which
runs through the later blocks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import check_choice
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.discovery.edge_ablation import Ablation
from tnlib_adapters.circuits.discovery.gated_layers import SIDES, GatedHeads
from tnlib_adapters.circuits.discovery.target_loss import Metric, Targets, metric_name, targets_of
from tnlib_adapters.reference.layers import Norm, normed
from tnlib_adapters.reference.model import attention_output
from tnlib_adapters.reference.weights import Branch, ResidualBlock, Weights, as_weights, attention_layers, named_blocks
from tnlib_adapters.result_table import Columns, Table, descending

Activation = Literal["stream", "layers", "heads"]
MOST_BYTES = 1 << 28  # of the patterns of one layer, which bounds the sequences that run at once
_SEQUENCES = 64  # that run at once, of short texts


@dataclass(frozen=True, eq=False, repr=False)
class Patching(Table):
    """Recovered shares of a metric by component and position, returned by `activation_patching`.

    Parameters
    ----------
    names
        Components, first layer first: "before 3" for the stream before attention 3, "3" for the output of attention 3,
        "mlp 3", or "3.1" for head 1 of layer 3.
    recovered
        (components, n): 0 where the patch changes nothing, 1 where it restores the metric of the clean run.
    clean, corrupted
        Metric of both runs.
    metric
        As in `Ablation`.

    References
    ----------
    K. Meng et al., "Locating and Editing Factual Associations in GPT" (2022), causal tracing.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.data.coded_letters import coded_letters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("known_circuit"))
    >>> tokens, answers = coded_letters(16, rng=0)
    >>> found = activation_patching(model, tokens[:8], answers[:8], tokens[8:], of="layers")
    >>> recovered = found.recovered.max(axis=1)  # at the best position
    >>> dict(zip(found.names, recovered.round(1).tolist()))
    {'0': 0.1, 'mlp 0': 0.0, '1': 0.3, 'mlp 1': 0.3}
    """

    names: tuple[str, ...]
    recovered: Array
    clean: float
    corrupted: float
    metric: Metric

    _SHOWN = 12

    @property
    def _title(self) -> str:
        name, n = metric_name(self.metric), self.recovered.shape[1]
        return (
            f"Patching of {len(self.names)} components at {n} positions; {name} {self.clean:.3f} clean, "
            f"{self.corrupted:.3f} corrupted"
        )

    def _columns(self, rows: Any) -> Columns:
        at = descending(np.abs(self.recovered), self.recovered.size)[rows]
        components, positions = np.unravel_index(at, self.recovered.shape)
        names = np.array(self.names, dtype=object)[components]
        return {"component": names, "position": positions, "recovered": self.recovered[components, positions]}

    def _picture(self) -> str:
        return heat_image(self.recovered, "recovered shares, components as rows and positions as columns", width=320)


@accepts_models
@single_threaded_blas
def activation_patching(
    model: Checkpoint | Weights,
    tokens: ArrayLike,
    mask: Array | None,
    corrupted: ArrayLike,
    *,
    of: Activation = "stream",
    metric: Metric = "loss",
) -> Patching:
    """Return how much of a metric each activation of the clean run restores in the run on corrupted tokens.

    Parameters
    ----------
    model
        A language model with one residual stream.
    tokens
        (n,) or (batch, n), integers, or one or several texts: the clean tokens.
    mask
        Same shape, bool: the tokens whose prediction counts in the metric. None: the last one.
    corrupted
        Same shape: the corrupted tokens or texts, aligned with the clean ones.
    of
        "stream": the stream before every attention layer and feed-forward layer. "layers": the outputs of these layers.
        "heads": the outputs of heads.
    metric
        As in `Ablation`: "loss", "kl", `LogitDifference`, or any function of logits and targets.

    Raises
    ------
    ArgumentError
        If the model has no unembedding, tokens, mask or corrupted tokens have wrong shapes, or both runs have the same
        metric.

    References
    ----------
    K. Meng et al., "Locating and Editing Factual Associations in GPT" (2022), causal tracing.

    Examples
    --------
    Only three outputs carry the answer, in the positions of letters and of queries:

    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.data.coded_letters import coded_letters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("known_circuit"))
    >>> tokens, answers = coded_letters(16, rng=0)
    >>> found = activation_patching(model, tokens[:8], answers[:8], tokens[8:], of="layers")
    >>> sorted(name for name, row in zip(found.names, found.recovered) if row.max() > 0.05)
    ['0', '1', 'mlp 1']
    """
    function = "activation_patching"
    check_choice(function, "of", of, get_args(Activation))
    how, weights = Ablation("resample", metric, corrupted), as_weights(function, model)
    targets = targets_of(weights, tokens, mask, function, metric)
    embedding: Any = weights.embedding
    others = how.corrupted_tokens(function, embedding, targets.tokens)
    clean, other = ([*_streams(weights.blocks, embedding(ids))] for ids in (targets.tokens, others))
    targets = targets.compared_with(clean[-1]) if metric == "kl" else targets
    ends = [targets.loss(streams[-1]) for streams in (clean, other)]
    if ends[0] == ends[1]:
        raise ArgumentError(
            f"{function}: both runs must differ in the metric, got {ends[0]:.4g} for both; choose other corrupted "
            "tokens."
        )
    patched: dict[str, Array] = {}
    for k, (block, names) in enumerate(named_blocks(weights.blocks)):
        later, after = weights.blocks[k + 1 :], block.after
        if of == "stream":
            later, after = weights.blocks[k:], None
        for name, base, change in _changes(of, block, names, clean[k], other[k]):
            patched[name] = _losses(targets, later, (base, change, after), ends[1])
    recovered = (np.stack([*patched.values()]) - ends[1]) / (ends[0] - ends[1])
    return Patching(tuple(patched), recovered, ends[0], ends[1], metric)


def _streams(blocks: Sequence[ResidualBlock], x: Array) -> Iterator[Array]:
    """Yield the stream (b, n, d) before every block, and the final one."""
    yield x
    for block in blocks:
        x = block.run(x, attention_output)
        yield x


def _changes(
    of: Activation, block: ResidualBlock, names: Sequence[str], clean: Array, other: Array
) -> Iterator[tuple[str, Array, Array]]:
    """Yield name, value in the corrupted run and change by the patch at every position, (b, n, d), of activations.

    For outputs the value is that of the stream with all of them, before a norm of the sum.
    """
    if of == "stream":
        yield f"before {', '.join(names)}", other, clean - other
        return
    parts = [_written(branch, other) for branch in block.branches]
    outputs = [part.sum(axis=0) for part in parts]
    stream = other + sum(normed(branch.behind, output) for branch, output in zip(block.branches, outputs, strict=True))
    for name, branch, part, output in zip(names, block.branches, parts, outputs, strict=True):
        is_attention = isinstance(branch.layer, Attention)
        if of == "heads" and not is_attention:
            continue
        changes = _written(branch, clean) - part
        of_parts = {name: changes.sum(axis=0)}
        if of == "heads":
            of_parts = {f"{name}.{h}": change for h, change in enumerate(changes[: branch.layer.n_heads])}  # type: ignore[union-attr]
        for label, change in of_parts.items():
            yield label, stream, normed(branch.behind, output + change) - normed(branch.behind, output)


def _written(branch: Branch, x: Array) -> Array:
    """Return what heads write before a norm, then the bias, (h + 1, b, n, d); or a feed-forward layer, (1, b, n, d)."""
    heads = GatedHeads.of(branch)
    if heads is None:
        return np.asarray(branch.layer(normed(branch.before, x)))[None]  # type: ignore[operator]
    bias = np.zeros_like(x) if heads.layer.b_O is None else np.broadcast_to(heads.layer.b_O, x.shape)
    return np.concatenate([heads.outputs(np.broadcast_to(x, (len(SIDES), 1, *x.shape))), bias[None]])


def _losses(
    targets: Targets, blocks: Sequence[ResidualBlock], patch: tuple[Array, Array, Norm | None], unchanged: float
) -> Array:
    """Return the metric (n,) with the change at one position at a time; `unchanged` where there is none."""
    base, change, after = patch
    b, n, d = base.shape
    losses = np.full(n, unchanged)
    positions = np.flatnonzero(change.any(axis=(0, 2)))
    n_bytes = max((layer.n_heads for layer in attention_layers(blocks)), default=1) * n**2 * base.itemsize
    sequences = min(_SEQUENCES, MOST_BYTES // n_bytes) or 1
    for at in np.array_split(positions, min(len(positions), -(-len(positions) * b // sequences)) or 1):
        x = np.repeat(base[None], len(at), axis=0)  # position b n d
        x[np.arange(len(at)), :, at] += change[:, at].swapaxes(0, 1)
        x = normed(after, x.reshape(-1, n, d))
        for block in blocks if len(at) else ():
            x = block.run(x, attention_output)
        losses[at] = [targets.loss(final) for final in x.reshape(len(at), b, n, d)]
    return losses
