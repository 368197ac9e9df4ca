r"""Data-aware (whitened) variants of the plain methods: the truncation error is measured on the layer's inputs.

With C = E[x x^T] over tokens, weighted by the squared gradient at the output (see `weighted_moments`), the error of a
weight on its inputs is

    E |x (W - W')|^2 = |C^1/2 (W - W')|^2,

so the best W' of a given rank is C^-1/2 times the truncated C^1/2 W (per matrix; Wang et al., SVD-LLM, ICLR 2025). The
best approximation of the scores x W_Q W_K^T z^T over independent inputs x, z is C^-1/2 [C^1/2 W_Q W_K^T C^1/2]_r C^-1/2
(per head). The published methods do not weight tokens; `calibrated` also uses moments of gradients and a fit. An input
basis shared by W_Q and W_K (`SharedBases`) is computed from C^1/2 W_Q and C^1/2 W_K. The product of a TT-matrix with
C^1/2 is not a TT-matrix, so TT-matrices are fitted in the weighted norm instead (`WeightedTTMatrix`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.statistics import collect
from tnlib_adapters.compression.methods.components import (
    Inputs,
    moment_roots,
    multiply_rows,
    nearest_kronecker_product,
    triangular_root,
)
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.factorise import FactorisedMatrix, PerWeight, factorise_layer
from tnlib_adapters.compression.methods.other_matrices import names_of, widest_component
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.methods.table import TABLE, Method, resolve
from tnlib_adapters.compression.options import CALIBRATION_TOKENS
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences, check_tokens, sample_batches
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Projections, Sizes, stack


class Whitened:
    """A plain truncation method applied to whitened weights, with its factors transformed back."""

    def __init__(self, method: str, projections: Projections, sizes: Sizes, inputs: Inputs, *, turned: bool) -> None:
        self._projections, self._sizes = projections, sizes
        heads = "heads" in TABLE[method].kinds
        self._of_heads = "" if not heads else "v" if turned else "qkv"  # with the bias as a last row
        with_bias = any(name in projections.biases for name in self._of_heads)
        moments = {"x": inputs.x[:-1, :-1]}
        moments |= {"homogeneous": inputs.x} if with_bias else {}
        moments |= {} if heads else {"o": inputs.y}
        roots = {name: triangular_root(matrix) for name, matrix in moments.items()}
        self._root = {name: root for name, (root, _) in roots.items()}
        self._inverse: dict[str, Array] = {name: inverse for name, (_, inverse) in roots.items()}
        self._inner = factorise_layer(TABLE[method], self._whitened(), sizes, rotary=turned, whitened=True)
        self.curves, self.fixed = self._inner.curves, self._inner.fixed

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors for one size per block."""
        return [self._back(matrix) for matrix in self._inner.matrices(choice)]

    def _whitened(self) -> Projections:
        weights = {name: weight.astype(np.float64) for name, weight in self._projections.weights.items()}
        biases = {name: bias.astype(np.float64) for name, bias in self._projections.biases.items()}
        for name in weights:
            if name == "o":
                weights[name] = self._root["o"] @ weights[name] if "o" in self._root else weights[name]
            elif name in self._of_heads and name in biases:
                homogeneous = self._root["homogeneous"] @ np.concatenate([weights[name], biases[name][None]])
                weights[name], biases[name] = homogeneous[:-1], homogeneous[-1]
            else:
                weights[name] = self._root["x"] @ weights[name]
        return Projections(weights, biases)

    def _back(self, matrix: FactoredMatrix) -> FactoredMatrix:
        arrays = dict(matrix.arrays)
        if matrix.kind == "dense":
            arrays["weight"] = self._projections.weights[matrix.of]
        elif matrix.kind == "stack":
            arrays["stack"] = stack(self._projections, self._sizes, matrix.of)
        elif matrix.kind == "tucker":
            arrays["factor2"] = self._inverse["x"] @ arrays["factor2"]
        elif matrix.kind == "low_rank":
            arrays["left"] = self._inverse["o" if matrix.of == "o" else "x"] @ arrays["left"]
        else:
            arrays["left"] = self._inverse_for(len(arrays["left"])) @ arrays["left"]
            if matrix.of == "qk":
                arrays["right"] = arrays["right"] @ self._inverse_for(arrays["right"].shape[1]).T
        dtype = self._projections.weights["q"].dtype
        return replace(matrix, arrays={part: a.astype(dtype) for part, a in arrays.items()})

    def _inverse_for(self, rows: int) -> Array:
        return self._inverse["homogeneous" if rows > self._sizes.d_model else "x"]


class WhitenedWeight:
    """A whitened weight, factorised by a method that writes low-rank products, with its factors transformed back.

    `columns` are second moments by which errors at the output are weighed as well; None for the identity.
    """

    def __init__(
        self,
        factorise: Callable[[Array], FactorisedMatrix],
        weight: Array,
        moments: Array,
        columns: Array | None = None,
    ) -> None:
        root, self._inverse = moment_roots(moments.astype(np.float64))
        whitened = multiply_rows(root, weight.astype(np.float64))
        if columns is not None:
            root, self._inverse_of_columns = triangular_root(columns)
            whitened = whitened @ root.T
        self._has_columns = columns is not None
        self._dtype, self._whitened = weight.dtype, factorise(whitened)
        self.curve = self._whitened.curve

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of one option."""
        factorised = self._whitened.at(option)
        arrays = {**factorised.arrays, "left": multiply_rows(self._inverse, factorised.arrays["left"])}
        if self._has_columns:
            arrays["right"] = arrays["right"] @ self._inverse_of_columns.T
        return replace(factorised, arrays={part: a.astype(self._dtype) for part, a in arrays.items()})


def factorise_layer_on(
    method: Method, projections: Projections, sizes: Sizes, inputs: Inputs, *, rotary: bool
) -> Factorised:
    """Factorise the attention of a layer in the norm of its inputs."""
    if method.calibration == "weighted":

        def factorise(name: str, weight: Array) -> FactorisedMatrix:
            factorised: FactorisedMatrix = resolve(method.weighted or "")(weight, inputs.reads(name, len(weight)))
            return factorised

        return PerWeight(projections, factorise)
    return Whitened(method.name, projections, sizes, inputs, turned=rotary)


def factorise_weight_on(method: Method, weight: Array, moments: Array) -> FactorisedMatrix:
    """Factorise one weight in the norm of its inputs, whose moments may be diagonal, (in,)."""
    if method.calibration == "weighted":
        factorised: FactorisedMatrix = resolve(method.weighted or "")(weight, moments)
        return factorised
    return WhitenedWeight(resolve(method.factorise), weight, moments)


def factorise_tied_on(method: Method, weight: Array, counts: Array, moments: Array) -> FactorisedMatrix:
    """Factorise a table of embeddings (vocab, width) that also makes the predictions, in the norms of both inputs.

    With the error D, the look-ups of tokens that occur n times err by |diag(n)^1/2 D|^2, and the logits of inputs of
    second moments C by |D C^1/2|^2, relative to those of the table itself. Their sum is replaced by the norm of the
    nearest Kronecker product, (n + a) (x) (C + b 1). The floor a is the share of the logits: those of tokens that do
    not occur in the text count as much as the others.
    """
    squares = weight.astype(np.float64) ** 2
    looked_up = counts / (counts @ squares.sum(axis=1) or 1.0)
    read = moments / (np.vdot(moments, weight.T.astype(np.float64) @ weight) or 1.0)
    rows, columns = nearest_kronecker_product([(looked_up, np.eye(len(read))), (np.ones(len(weight)), read)])
    if method.calibration == "weighted":
        factorised: FactorisedMatrix = resolve(method.weighted or "")(weight, rows)
        return factorised
    return WhitenedWeight(resolve(method.factorise), weight, rows, columns)


def inputs_of_text(
    checkpoint: Checkpoint,
    text: str | TokenSequences,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    n_tokens: int = CALIBRATION_TOKENS // 2,
    source: SourceModel | None = None,
    workspace: Workspace | None = None,
) -> Mapping[str, Array]:
    """Return the weighted input moments of all weights of `what` on a text, by their keys.

    At most `n_tokens` are read. `source` is the running model of `checkpoint`; None loads it. `workspace` has the
    memory and the temporary files of the moments; None for the default memory, without files.

    Raises
    ------
    ArgumentError
        If the text is too short.
    """
    from tnlib_adapters.instrument.weight_inputs import find_places

    model = (source or SourceModel(checkpoint)).original
    batches = model.batches(text)
    check_tokens(model.function, batches, widest_component(checkpoint, what), "components")
    names = names_of(checkpoint, what, with_text=True)
    sample = sample_batches(batches, n_tokens)
    places = find_places(model, names, attention=bool(checkpoint.wiring.projection_layers(what)))
    return collect(model, places, sample, progress, workspace=workspace).reads
