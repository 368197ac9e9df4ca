"""The same architecture with narrower heads, by equally spaced rotary planes, and with fewer neurons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.architectures.geometric_frequencies import base_and_factor
from tnlib_adapters.architectures.wiring import AttentionWiring
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, with_folder
from tnlib_adapters.compression.evaluation.evaluate import Reference
from tnlib_adapters.compression.evaluation.operator_errors import compare_layer
from tnlib_adapters.compression.layouts.narrowed_layers import NarrowedLayers, Widths, widths_of
from tnlib_adapters.compression.methods.factorisation import measure_of_text
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.compression.options import HEAD, NEURONS
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.compression.report.report import HeadReport, LayerReport
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.sizes import attention_tensors, cache_bytes, count_matrix, stored_bytes
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences
from tnlib_adapters.compression.write import encode_in_range, lazy_entry, write_replaced
from tnlib_adapters.factors.projections import Products, put_together

# reason to refuse narrower heads -> test of the attention of a layer
_OTHER_HEADS: Mapping[str, Callable[[AttentionWiring], bool]] = {
    "its queries and keys are normalised": lambda a: bool(a.head_norms),
    "it has no rotary embeddings": lambda a: a.frequencies(None, "compress") is None,
    "its rotary embeddings rotate adjacent columns": lambda a: a.pairs,
    "its rotary embeddings are scaled other than linearly": lambda a: base_and_factor(a) is None,
}


class NarrowModel:
    """A checkpoint with smaller `head_dim` and `intermediate_size`.

    Parameters
    ----------
    checkpoint, request
        The original, and the options.
    workspace
        Memory and temporary files of the weights.

    Attributes
    ----------
    what
        Part of the model that becomes smaller, a key of `SUBJECTS` of the report.

    Raises
    ------
    ArgumentError
        If config.json cannot state the sizes, or they are none of this model.
    """

    def __init__(self, checkpoint: Checkpoint, request: Request, workspace: Workspace) -> None:
        self._checkpoint, self._before = checkpoint, widths_of(checkpoint)
        if any(layer.attention.latent for layer in checkpoint.wiring.layers):
            self._refuse("its keys and values are made from latent vectors")
        widths = self._requested(request)
        heads, neurons = widths.head < self._before.head, widths.neurons != self._before.neurons
        self.what = "linear" if heads and neurons else "mlp" if neurons else "attention"
        sizes: dict[str, Any] = {HEAD: widths.head} if heads else {}
        self._narrow = self._with_config(sizes)  # with its own scale of the scores; the tensors are the original ones
        self._sizes = sizes | ({NEURONS: widths.neurons} if neurons else {})
        self._layers = NarrowedLayers(checkpoint, widths, workspace, request)
        self._tensors = StoredArrays(workspace)

    def fit(self, source: SourceModel, text: TokenSequences | None, progress: Progress) -> None:
        """Choose what the layers keep, and fit their weights on the text."""
        for k, products in enumerate(self._layers.fitted(source, text or (), progress)):
            self._tensors.add(self._tensors_of(k, products))

    def write(self, out: Path) -> Iterator[tuple[str, int, int]]:
        """Write the narrow model into the empty folder `out`; yields (stage, done, total)."""
        replaced, new = self._checkpoint.folder.tensors, self._tensors.entries()
        entries = {name: [lazy_entry(name, replaced[name].dtype, a.shape, self._encoded)] for name, a in new.items()}
        config = {**self._checkpoint.config, **self._sizes, **self._rope()}
        return write_replaced(self._checkpoint, entries, config, out)

    def measures(
        self, after: Checkpoint, source: SourceModel, held_out: TokenSequences, progress: Progress
    ) -> dict[str, Any]:
        """Return the fields of the report that are measured on the written model, the error on the held-out text."""
        before, what = self._checkpoint, self.what
        evaluation = Reference(source.original, held_out).compare(source.open(after), progress) if held_out else None
        measures = {} if evaluation is None else evaluation.measures()
        layers, heads = self._compare(after)
        names = names_of(before, what)
        (bytes_before, n_other), (bytes_after, _) = (stored_bytes(own, what, names) for own in (before, after))
        n_before, n_after = sum(layer.n_before for layer in layers), sum(layer.n_after for layer in layers)
        return {
            "method": "calibrated",
            "kept": n_after / n_before,
            "n_before": n_before,
            "n_after": n_after,
            "n_other": n_other,
            "bytes_before": bytes_before,
            "bytes_after": bytes_after,
            "layers": layers,
            "heads": heads,
            "quality": {f"{name}, on held-out text": value for name, value in measures.items()},
            "what": what,
            "measure": measure_of_text(before),
            "measured": None if evaluation is None else evaluation.error,
            "cache_bytes": {"before": cache_bytes(before), "after": cache_bytes(after)},
        }

    # ----------------------------------------------------------------------------------------------------- the sizes

    def _requested(self, request: Request) -> Widths:
        """Return the widths of a request; for a fraction, heads first, and as many neurons as the rest admits."""
        before, sizes, keep = self._before, request.budget.sizes or {}, request.budget.keep
        if keep is not None:
            self._check_heads()
            self._check_neurons()
            head = max(2, 2 * math.floor(keep * before.head / 2 + 1e-9))
            return Widths(head, head, self._neurons_within(keep, head))
        head, neurons = _at_most(HEAD, sizes.get(HEAD, before.head), before.head), before.neurons
        if NEURONS in sizes:
            self._check_neurons()
            neurons = _at_most(NEURONS, sizes[NEURONS], neurons or 0)
        if head == before.head:
            return Widths(head, before.value, neurons)
        if head % 2:
            self._refuse(f"{HEAD} must be even, got {head}", "pass an even number")
        self._check_heads()
        return Widths(head, head, neurons)

    def _neurons_within(self, keep: float, head: int) -> int:
        """Return the largest number of neurons with which attention and feed-forward layers store the fraction."""
        counts = (_count(self._checkpoint, k) for k in range(self._checkpoint.n_layers))
        attention, matrices = map(sum, zip(*counts, strict=True))
        left = keep * (attention + matrices) - attention * head / self._before.head
        return max(1, math.floor(left / (matrices / (self._before.neurons or 1)) + 1e-9))

    def _check_heads(self) -> None:
        """Raise unless config.json may state a narrower head."""
        if reason := next(self._reasons_of_heads(), None):
            advice = f"pass sizes={{'{NEURONS}': ...}} (--size {NEURONS}=...) to leave the heads as they are"
            self._refuse(reason, advice)

    def _reasons_of_heads(self) -> Iterator[str]:
        layers, sizes = [layer.attention for layer in self._checkpoint.wiring.layers], self._checkpoint.sizes
        yield from (reason for reason, applies in _OTHER_HEADS.items() if any(map(applies, layers)))
        rotated = layers[0].frequencies(None, "compress")
        if rotated is not None and 2 * len(rotated.radians) < sizes.d_head:
            yield "some columns of its heads are not rotated"
        if len({base_and_factor(attention) for attention in layers}) > 1:
            yield "its layers have different rotary frequencies"
        if sizes.d_value != sizes.d_head or self._with_config({HEAD: 2}).sizes.d_head != 2:
            yield f"its config.json has no {HEAD} of all heads"

    def _check_neurons(self) -> None:
        """Raise unless config.json states the number of neurons."""
        if any(layer.feed_forward is None for layer in self._checkpoint.wiring.layers):
            self._refuse("not all of its layers have one feed-forward layer")
        stated = dict(self._checkpoint.config)  # as in the file: the settings that are read have defaults
        if stated.get(NEURONS) != self._before.neurons:
            self._refuse(f"its config.json has no {NEURONS}")

    def _refuse(self, reason: str, advice: str = "use layout 'factored' or 'dense'") -> None:
        raise ArgumentError(
            f"compress: layout 'narrow' cannot hold this {self._checkpoint.wiring.model_type}, because {reason}; "
            f"{advice}."
        )

    # --------------------------------------------------------------------------------------- what is written, measured

    def _with_config(self, changed: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint wired by another config.json."""
        folder = self._checkpoint.folder
        return with_folder(self._checkpoint, replace(folder, config={**folder.config, **changed}))

    def _tensors_of(self, k: int, products: Products) -> dict[str, Array]:
        """Return the tensors of the attention and the feed-forward layer of layer k under their names."""
        before, after = (own.wiring.layers[k].attention for own in (self._checkpoint, self._narrow))
        projections = self._layers.narrow_projections(products, query_scale=before.scale / after.scale)
        return put_together(after, projections) | self._layers.narrow_feed_forward(k, products)

    def _encoded(self, name: str) -> Array:
        return encode_in_range(name, self._tensors[name], self._checkpoint.folder.tensors[name].dtype)

    def _rope(self) -> dict[str, Any]:
        """Return the keys of config.json with the rotary frequencies of the planes."""
        rope, planes = base_and_factor(self._checkpoint.wiring.layers[0].attention), self._layers.planes
        if planes is None or rope is None:
            return {}
        base, factor = planes.base(rope[0]), rope[1] * planes.factor(rope[0])
        kind = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
        if "rope_parameters" in self._checkpoint.config:
            beside = {"rope_theta": base} if "rope_theta" in self._checkpoint.config else {}
            return {"rope_parameters": {**kind, "rope_theta": base}} | beside
        return {"rope_theta": base, "rope_scaling": None if factor == 1 else {**kind, "type": "linear"}}

    def _compare(self, after: Checkpoint) -> tuple[list[LayerReport], list[HeadReport]]:
        """Return the errors of the operators of all heads, and the numbers of the part that becomes smaller."""
        layers, heads, before = [], [], self._checkpoint
        parts = slice(int(self.what == "mlp"), 1 if self.what == "attention" else 2)
        for k in range(before.n_layers):
            original = before.attention(k)
            reports, qk, ov = compare_layer(k, original, _rescaled(after.attention(k), original.scale))
            worst = max(max(head.qk_error, head.ov_error) for head in reports)
            n_before, n_after = (sum(_count(own, k)[parts]) for own in (before, after))
            layers.append(LayerReport(k, qk, ov, worst, n_before, n_after))
            heads += reports
        return layers, heads


def _count(checkpoint: Checkpoint, k: int) -> list[int]:
    """Return the numbers of the attention and of the feed-forward layer of layer k."""
    matrices = checkpoint.wiring.layers[k].feed_forward_matrices
    attention = sum(info.size for info in attention_tensors(checkpoint, k))
    return [attention, sum(count_matrix(checkpoint, matrix.name) for matrix in matrices)]


def _at_most(key: str, value: int, most: int) -> int:
    """Return a requested size, from 1 to that of the original."""
    if not 1 <= value <= most:
        raise ArgumentError(
            f"compress: {key} in sizes must lie between 1 and {most}, the size of this model, got {value}; choose "
            "another."
        )
    return value


def _rescaled(layer: Attention, scale: float) -> Attention:
    """Return a layer with the same scores by another scale: reports compare QK operators without it."""
    factor = layer.scale / scale
    b_q = None if layer.b_Q is None else factor * layer.b_Q
    return replace(layer, W_Q=factor * layer.W_Q, b_Q=b_q, scale=scale)
