"""Factored matrices multiplied out, by kind, and folders that read as dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import matmul
from typing import Any

import numpy as np

from tnlib import CP, TTMatrix, Tucker
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.factors.factored_matrix import Description, FactoredMatrix, ranks_of, whole_part
from tnlib_adapters.factors.interpolative import unpack
from tnlib_adapters.factors.projections import Projections, Sizes, unstack
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.process_memory import LARGE_TABLE
from tnlib_adapters.files.safetensors_file import ComputedTensor, TensorInfo


def expand(matrices: Sequence[FactoredMatrix], sizes: Sizes, dtype: Any = np.float64) -> Projections:
    """Multiply factors out, in `dtype`; a dense weight of that dtype is not copied.

    Returns the replaced weights (in, out) and biases: projections of one layer by letter, other weights by module.
    """
    weights: dict[str, Array] = {}
    biases: dict[str, Array] = {}
    for matrix in matrices:
        wide = replace(matrix, arrays={k: a.astype(dtype, copy=False) for k, a in matrix.arrays.items()})
        expanded = EXPAND[matrix.kind](wide, sizes)
        weights |= expanded.weights
        biases |= expanded.biases
    return Projections(weights, biases)


def _ttm(matrix: FactoredMatrix, _: Sizes) -> Projections:
    cores = [matrix.arrays[f"core{k}"] for k in range(len(matrix.arrays.keys() - {"bias"}))]
    return _one_weight(matrix, TTMatrix(tuple(cores)).full())


def weight_of_parts(parts: Sequence[Any]) -> Any:
    """Return a weight from its parts, arrays or tensors: (W,), or (L, R) for L R.

    >>> weight_of_parts([np.ones((2, 1)), np.ones((1, 2))]).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return reduce(matmul, parts)


def _one_weight(matrix: FactoredMatrix, weight: Array) -> Projections:
    return Projections({matrix.of or matrix.module: weight}, _own_bias(matrix))


def _own_bias(matrix: FactoredMatrix) -> dict[str, Array]:
    return {matrix.of: matrix.arrays["bias"]} if "bias" in matrix.arrays else {}


def _stacked(make: Callable[..., Any], first: str, matrix: FactoredMatrix, _: Sizes) -> Projections:
    """Return the projections of a stack in a format of tnlib, made from one part and the factors of all legs."""
    factors = [matrix.arrays[f"factor{k}"] for k in range(len(matrix.arrays) - 1)]
    return unstack(make(matrix.arrays[first], tuple(factors)).full())


def _interpolative(matrix: FactoredMatrix, sizes: Sizes) -> Projections:
    """Multiply out an interpolative decomposition: all rows of the weight are combinations of some of its rows.

    `left` (m - r, r) holds the coefficients of the other rows, `right` (r, n) the chosen rows; the bias may be the last
    of the m rows. A bias that no row holds is `bias`, or 0: a key bias adds the same to all scores of a query, and a
    value bias adds a constant to the output.
    """
    name = matrix.of
    rows_and_bias = unpack(matrix.arrays["left"], matrix.rows) @ matrix.arrays["right"]  # m [r], [r] n
    if not name:
        return _one_weight(matrix, rows_and_bias)
    n_in, _ = sizes.sides(name)
    biases = {letters: np.zeros(sizes.sides(letters)[1]) for letters in matrix.biases}
    biases |= {name: rows_and_bias[n_in]} if len(rows_and_bias) > n_in else {}
    return Projections({name: rows_and_bias[:n_in]}, biases | _own_bias(matrix))


def _heads(matrix: FactoredMatrix, sizes: Sizes) -> Projections:
    """Return weights with d_head columns per head from factors with as many columns per head as its rank; rest zero.

    `left` (d_model, r), or (d_model + 1, r) with the bias as last row, holds the first projection; `right` (r, d_model)
    or (r, d_model + 1) the second.
    """
    first, second = list(matrix.of)
    width = sizes.of_head(first)
    left = np.zeros((len(matrix.arrays["left"]), sizes.widths[first]))
    right = np.zeros((sizes.widths[second], matrix.arrays["right"].shape[1]))
    left[:, places(ranks_of(first, matrix.ranks, sizes), width)] = matrix.arrays["left"]
    right[places(ranks_of(second, matrix.ranks, sizes), width)] = matrix.arrays["right"]

    d = sizes.d_model
    weights = {first: left[:d], second: right if second == "o" else right[:, :d].T}
    biases = {first: left[d]} if len(left) > d else {}
    if second != "o" and right.shape[1] > d:
        biases[second] = right[:, d]
    return Projections(weights, biases)


def places(ranks: Sequence[int], d_head: int) -> list[int]:
    """Return the indices of the inner dimensions that heads of these ranks use: the first of each head.

    >>> places([1, 2], d_head=4)
    [0, 4, 5]
    """
    return [head * d_head + column for head, r in enumerate(ranks) for column in range(r)]


EXPAND: Mapping[str, Callable[[FactoredMatrix, Sizes], Projections]] = {
    "dense": lambda matrix, _: _one_weight(matrix, matrix.arrays[whole_part(matrix.of)]),
    "low_rank": lambda matrix, _: _one_weight(matrix, matrix.arrays["left"] @ matrix.arrays["right"]),
    "ttm": _ttm,
    "heads": _heads,
    "interpolative": _interpolative,
    "tucker": partial(_stacked, Tucker, "core"),
    "cp": partial(_stacked, CP, "weights"),
    "stack": lambda matrix, _: unstack(matrix.arrays["stack"]),
}


@dataclass(frozen=True)
class ExpandedTensor(ComputedTensor):
    """A weight stored as factors, multiplied out when it is read."""

    description: Description
    parts: Mapping[str, TensorInfo]
    sizes: Sizes
    transposed: bool

    def read_stored(self) -> Array:
        """Multiply out, in double precision unless the table is large."""
        matrices = [self.description.read(lambda part: self.parts[part].read_finite())]
        dtype = np.float32 if self.size >= LARGE_TABLE else np.float64
        weight = expand(matrices, self.sizes, dtype).weights[self.description.module]
        del matrices  # before the product is copied in single precision
        return (weight.T if self.transposed else weight).astype(np.float32, copy=False)


def with_expanded(folder: Folder, wiring: Wiring, described: Sequence[Description]) -> Folder:
    """Return a folder in which factored weights outside the attention read as dense tensors of their own name."""
    tensors = dict(folder.tensors)
    for description in described:
        if description.of:
            continue
        matrix = wiring.matrices[description.module]
        parts = {part: folder.tensors[description.stored_name(part, wiring)] for part in description.tensors}
        transposed = matrix.stored == "out_in"
        shape = description.shape[::-1] if transposed else description.shape
        file = next(iter(parts.values())).file
        tensors[matrix.weight] = ExpandedTensor(
            file, matrix.weight, "F32", shape, 0, 0, description, parts, wiring.sizes, transposed
        )
    return replace(folder, tensors=tensors)
