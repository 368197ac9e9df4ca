"""Baselines for all weights of a model at one budget of bits: the functions of `quantizers`, and their settings.

Every baseline takes its largest setting within the budget: a grid of one width and group size for all weights, a
fraction of all weights, or ranks of one threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tnlib_adapters.architectures.grouped_heads import Sizes
from tnlib_adapters.compression.methods.components import Components

from benchmarks.quantizers import (
    SCALE_BITS,
    Grid,
    Rounded,
    awq,
    count_component,
    global_ranks,
    gptq,
    largest_products,
    largest_units,
    low_rank,
    nystroem,
    query_key_basis,
    round_to_nearest,
    stored,
    svd_llm,
    two_sided,
    value_basis,
)
from tnlib._typing import Array

GRIDS = [(bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128, 0)]


@dataclass(frozen=True)
class Part:
    """A weight of the compressed part, with the statistics of a text.

    Parameters
    ----------
    key
        Key of its statistics.
    weight
        (in, out). A table of embeddings is (width, vocab): the unembedding, if it is one as well.
    reads, magnitudes
        (in, in) and (in,), second moments and mean absolute values of the inputs; the identity and 1 for a table that
        is no unembedding.
    slopes
        Second moments of the gradients at the output; None for a table.
    folded
        True if scales of the inputs can be multiplied into the norm or the weight before.
    factors
        Returns the components of a table by its statistics in both uses.
    outputs
        (out, out), second moments of queries, keys and values with their biases; None for other weights.
    layer
        Its layer; None for a table.
    """

    key: str
    weight: Array
    reads: Array
    magnitudes: Array
    slopes: Array | None
    folded: bool = False
    factors: Callable[[], Components] | None = None
    outputs: Array | None = None
    layer: int | None = None

    @cached_property
    def whitened(self) -> Components:
        """Components by input moments."""
        return svd_llm(self.weight, self.reads)

    @cached_property
    def two_sided(self) -> Components:
        """Components by input moments and output gradients."""
        return self.factors() if self.factors else two_sided(self.weight, self.reads, self.slopes)


@dataclass(frozen=True)
class Parts:
    """All weights of the compressed part; a layer has "q", "k", "v" and "o" before the weights of its MLP."""

    parts: list[Part]
    sizes: Sizes
    rotary: bool

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the weights."""
        return [part.weight.shape for part in self.parts]


Rounding = Callable[[Part, Grid], Rounded]
Result = tuple[str, list[Array], int]  # setting, weights, bits without those of biases
Baseline = Callable[[Parts, int], "Result | None"]  # weights and budget in bits -> None if nothing is within it


def largest_grid(shapes: Sequence[tuple[int, ...]], budget: int, *, symmetric: bool = False) -> Grid | None:
    """Return the grid with most bits within a budget."""
    grids = [Grid(bits, group, symmetric) for bits, group in GRIDS]
    counts = [sum(grid.count(shape) for shape in shapes) for grid in grids]
    within = [k for k, count in enumerate(counts) if count <= budget]
    return grids[max(within, key=lambda k: counts[k])] if within else None


def rounding(function: Rounding, *, symmetric: bool = False) -> Baseline:
    """Return a baseline that rounds every weight to the grid with most bits within the budget."""

    def run(model: Parts, budget: int) -> Result | None:
        grid = largest_grid(model.shapes, budget, symmetric=symmetric)
        if grid is None:
            return None
        rounded = [function(part, grid) for part in model.parts]
        return str(grid), [r.weight for r in rounded], sum(r.n_bits for r in rounded)

    return run


def scaled(model: Parts, budget: int) -> Result | None:
    """Round every weight by AWQ; weights with the same input share its scales."""
    parts, by_input = model.parts, dict[bytes, list[int]]()
    for k, part in enumerate(parts):
        by_input.setdefault(part.magnitudes.tobytes() + part.reads.tobytes(), []).append(k)
    first = [parts[indices[0]] for indices in by_input.values()]
    n_scale_bits = sum(SCALE_BITS * len(part.weight) for part in first if not part.folded)
    grid = largest_grid(model.shapes, budget - n_scale_bits)
    if grid is None:
        return None
    weights, n_bits = [part.weight for part in parts], 0
    for part, indices in zip(first, by_input.values(), strict=True):
        concatenated = np.concatenate([weights[k] for k in indices], axis=1)
        rounded = awq(concatenated, part.reads, part.magnitudes, grid, folded=part.folded)
        n_bits += rounded.n_bits
        ends = np.cumsum([weights[k].shape[1] for k in indices])[:-1]
        for k, weight in zip(indices, np.split(rounded.weight, ends, axis=1), strict=True):
            weights[k] = weight
    return str(grid), weights, n_bits


def truncation(factors: Callable[[Part], Components], bits: int, *, of_model: bool) -> Baseline:
    """Return a baseline that truncates all weights: by the same fraction, or with ranks of one budget `of_model`."""

    def run(model: Parts, budget: int) -> Result | None:
        components, total = [factors(part) for part in model.parts], sum(m * n for m, n in model.shapes)
        if of_model:
            ranks = global_ranks(components, budget, bits)
        else:
            ranks = [min(m, n, budget * m * n // total // count_component((m, n), bits)) for m, n in model.shapes]
        products = [low_rank(c, rank, bits) for c, rank in zip(components, ranks, strict=True)]
        setting = f"ranks {min(ranks)} to {max(ranks)}"
        return setting, [product.weight for product in products], sum(product.n_bits for product in products)

    return run


def blocks(bits: int, *, a3: bool) -> Baseline:
    """Return MoDeGPT or A3: hidden units removed between two weights, the same fraction of all; tables by SVD-LLM."""

    def run(model: Parts, budget: int) -> Result | None:
        share = budget / sum(m * n for m, n in model.shapes)  # bits per number
        weights, n_bits, ranks = [part.weight.copy() for part in model.parts], 0, []
        by_layer: dict[int | None, list[int]] = {}
        for k, part in enumerate(model.parts):
            by_layer.setdefault(part.layer, []).append(k)
        for layer, indices in by_layer.items():
            if layer is None:
                for k in indices:
                    m, n = model.shapes[k]
                    rank = min(m, n, int(share * m * n) // count_component((m, n), bits))
                    product = low_rank(model.parts[k].whitened, rank, bits)
                    weights[k], n_bits = product.weight, n_bits + product.n_bits
                continue
            head_ranks, count = _fewer_dimensions(model, indices[:4], weights, share, bits, a3=a3)
            ranks, n_bits = [*ranks, *head_ranks], n_bits + count
            if indices[4:]:
                rank, count = _fewer_units(model, indices[4:], weights, share, bits, a3=a3)
                ranks, n_bits = [*ranks, rank], n_bits + count
        return f"ranks {min(ranks)} to {max(ranks)}", weights, n_bits

    return run


def _fewer_dimensions(
    model: Parts, indices: Sequence[int], weights: list[Array], share: float, bits: int, *, a3: bool
) -> tuple[list[int], int]:
    """Truncate the dimensions of all heads of a layer in place; return ranks of queries and values, and all bits."""
    sizes, (q, k, v, o) = model.sizes, indices
    n_shared, (of_q, of_k, of_v) = sizes.n_heads // sizes.kv_heads, (model.parts[index].outputs for index in (q, k, v))
    n_inputs, n_outputs = len(weights[q]), weights[o].shape[1]
    per_scale = 0 if bits == 16 else SCALE_BITS
    # of one dimension: its columns of queries and keys; its column of values and its rows of outputs
    lengths = (1 + n_shared) * n_inputs, n_inputs + n_shared * n_outputs
    costs = lengths[0] * bits + (1 + n_shared) * per_scale, lengths[1] * bits + 2 * per_scale
    total = sizes.kv_heads * (lengths[0] * sizes.d_head + lengths[1] * sizes.d_value)
    step = 2 if model.rotary else 1
    rank = min(sizes.d_head, int(share * lengths[0] * sizes.d_head) // costs[0] // step * step)
    budget = int(share * total) - sizes.kv_heads * rank * costs[0]
    rank_of_values = min(sizes.d_value, budget // sizes.kv_heads // costs[1])
    for head in range(sizes.kv_heads):
        queries = [_columns(n, sizes.d_head) for n in range(head * n_shared, (head + 1) * n_shared)]
        keys, values = _columns(head, sizes.d_head), _columns(head, sizes.d_value)
        moments = sum(of_q[columns, columns] for columns in queries), of_k[keys, keys]
        if a3 and not model.rotary:
            to, back = query_key_basis(*moments, rank)
        else:
            to = back = np.eye(sizes.d_head)[:, largest_products(*moments, rank, rotary=model.rotary)]
        for columns in queries:
            weights[q][:, columns] = stored(weights[q][:, columns] @ to, bits) @ back.T
        weights[k][:, keys] = stored(weights[k][:, keys] @ back, bits) @ to.T
        rows = [_columns(n, sizes.d_value) for n in range(head * n_shared, (head + 1) * n_shared)]
        outputs = np.concatenate(
            [weights[o][head_rows] for head_rows in rows], axis=1
        )  # of all heads that share these values
        averaged = sum(model.parts[o].reads[head_rows, head_rows] for head_rows in rows)
        to, back = value_basis(outputs, averaged if a3 else of_v[values, values], rank_of_values)
        weights[v][:, values] = stored(weights[v][:, values] @ to, bits) @ back
        outputs = to @ stored((back @ outputs).T, bits).T
        for head_rows, head_outputs in zip(rows, np.split(outputs, n_shared, axis=1), strict=True):
            weights[o][head_rows] = head_outputs
    return [rank, rank_of_values], sizes.kv_heads * (rank * costs[0] + rank_of_values * costs[1])


def _fewer_units(
    model: Parts, indices: Sequence[int], weights: list[Array], share: float, bits: int, *, a3: bool
) -> tuple[int, int]:
    """Remove units of an MLP in place; return how many stay, and all bits."""
    *inputs, down = indices
    moments, outputs = model.parts[down].reads, weights[down]
    cost = sum(len(weights[k]) for k in inputs) + outputs.shape[1]
    n_numbers, cost = cost * len(outputs), cost * bits + (0 if bits == 16 else SCALE_BITS * len(indices))
    rank = min(len(outputs), int(share * n_numbers) // cost)
    if a3:
        kept = largest_units(outputs, moments, rank)
        new = outputs[kept]
    else:
        kept, new = nystroem(outputs, moments, rank)
    for k in inputs:
        weights[k] = stored(weights[k], bits)  # those of other units do not matter, their outputs are 0
    weights[down] = np.zeros_like(outputs)
    weights[down][kept] = stored(new.T, bits).T
    return rank, rank * cost


def _columns(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


BASELINES: dict[str, Baseline] = {
    "nearest": rounding(lambda part, grid: round_to_nearest(part.weight, grid)),
    "nearest, symmetric": rounding(lambda part, grid: round_to_nearest(part.weight, grid), symmetric=True),
    "gptq": rounding(lambda part, grid: gptq(part.weight, part.reads, grid)),
    "gptq, activation order": rounding(lambda part, grid: gptq(part.weight, part.reads, grid, activation_order=True)),
    "gptq, symmetric": rounding(lambda part, grid: gptq(part.weight, part.reads, grid), symmetric=True),
    "awq": scaled,
    "svd-llm": truncation(lambda part: part.whitened, 16, of_model=False),
    "svd-llm, int8": truncation(lambda part: part.whitened, 8, of_model=False),
    "two-sided": truncation(lambda part: part.two_sided, 16, of_model=True),
    "two-sided, int8": truncation(lambda part: part.two_sided, 8, of_model=True),
    "modegpt": blocks(16, a3=False),
    "modegpt, int8": blocks(8, a3=False),
    "a3": blocks(16, a3=True),
    "a3, int8": blocks(8, a3=True),
}
