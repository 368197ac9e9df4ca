r"""Data-aware (whitened) variants of the plain methods: the truncation error is measured on the layer's inputs.

With C = E[x x^T], the error of a weight on its inputs is

    E |x (W - W')|^2 = |C^1/2 (W - W')|^2,

so the best W' of a given rank is C^-1/2 times the truncated C^1/2 W (per matrix; Wang et al., SVD-LLM, ICLR 2025). The
best approximation of the scores x W_Q W_K^T z^T over independent inputs x, z is C^-1/2 [C^1/2 W_Q W_K^T C^1/2]_r C^-1/2
(per head). These are the published methods; `calibrated` also uses gradients and a fit. An input basis shared by W_Q
and W_K (`SharedBases`) is computed from C^1/2 W_Q and C^1/2 W_K. The product of a TT-matrix with C^1/2 is not a
TT-matrix, so TT-matrices are fitted in the weighted norm instead (`WeightedTTMatrices`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.moments import Inputs, triangular_root
from tnlib_adapters.compression.calibration.statistics import collect_reads
from tnlib_adapters.compression.calibration.text import check_tokens, some_of
from tnlib_adapters.compression.evaluation.error_measures import measure_of_text
from tnlib_adapters.compression.methods.factorisation import Factorisation
from tnlib_adapters.compression.methods.other_matrices import names_of, widest_input
from tnlib_adapters.compression.methods.shared_bases import SharedBases
from tnlib_adapters.compression.methods.table import METHODS, TURNED, Factorised
from tnlib_adapters.compression.methods.uncalibrated import turns
from tnlib_adapters.compression.methods.weighted_ttm import WeightedTTMatrices
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.sizes import count_attention
from tnlib_adapters.factors.attention_factors import Piece, stack
from tnlib_adapters.factors.projections import Projections, Sizes

_TOKENS = 65_536


class Whitened:
    """A plain truncation method applied to whitened weights, with its factors transformed back."""

    def __init__(self, method: str, projections: Projections, sizes: Sizes, inputs: Inputs, *, turned: bool) -> None:
        self._old, self._sizes = projections, sizes
        heads = method == "heads"
        self._of_heads = "" if not heads else "v" if turned else "qkv"  # with the bias as a last row
        with_bias = any(name in projections.biases for name in self._of_heads)
        moments = {"x": inputs.x[:-1, :-1]}
        moments |= {"homogeneous": inputs.x} if with_bias else {}
        moments |= {} if heads else {"o": inputs.y}
        roots = {name: triangular_root(matrix) for name, matrix in moments.items()}
        self._root = {name: root for name, (root, _) in roots.items()}
        self._inverse: dict[str, Array] = {name: inverse for name, (_, inverse) in roots.items()}
        make = SharedBases if method == "tucker" else (TURNED if turned else METHODS)[method]
        self._inner: Factorised = make(self._whitened(), sizes)
        self.curves, self.fixed = self._inner.curves, self._inner.fixed

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors for one size per block."""
        return [self._back(piece) for piece in self._inner.pieces(choice)]

    def _whitened(self) -> Projections:
        weights = {name: weight.astype(np.float64) for name, weight in self._old.weights.items()}
        biases = {name: bias.astype(np.float64) for name, bias in self._old.biases.items()}
        for name in weights:
            if name == "o":
                weights[name] = self._root["o"] @ weights[name] if "o" in self._root else weights[name]
            elif name in self._of_heads and name in biases:
                homogeneous = self._root["homogeneous"] @ np.concatenate([weights[name], biases[name][None]])
                weights[name], biases[name] = homogeneous[:-1], homogeneous[-1]
            else:
                weights[name] = self._root["x"] @ weights[name]
        return Projections(weights, biases)

    def _back(self, piece: Piece) -> Piece:
        arrays = dict(piece.arrays)
        if piece.kind == "dense":
            arrays["weight"] = self._old.weights[piece.of]
        elif piece.kind == "stack":
            arrays["stack"] = stack(self._old, self._sizes, piece.of)
        elif piece.kind == "tucker":
            arrays["factor2"] = self._inverse["x"] @ arrays["factor2"]
        elif piece.kind == "low_rank":
            arrays["left"] = self._inverse["o" if piece.of == "o" else "x"] @ arrays["left"]
        else:
            arrays["left"] = self._inverse_for(len(arrays["left"])) @ arrays["left"]
            if piece.of == "qk":
                arrays["right"] = arrays["right"] @ self._inverse_for(arrays["right"].shape[1]).T
        dtype = self._old.weights["q"].dtype
        return replace(piece, arrays={part: a.astype(dtype) for part, a in arrays.items()})

    def _inverse_for(self, rows: int) -> Array:
        return self._inverse["homogeneous" if rows > self._sizes.d_model else "x"]


def inputs_of_text(
    checkpoint: Checkpoint, text: str, progress: Progress = quiet, *, what: str = "attention"
) -> dict[str, Array]:
    """Return the input moments of all weights of `what` on a text, by their keys.

    Raises
    ------
    ArgumentError
        If the text is too short.
    """
    from tnlib_adapters.instrument.running_model import open_running
    from tnlib_adapters.instrument.weight_inputs import find_places

    model = open_running(checkpoint.folder.path)
    batches = model.batches(text)
    check_tokens(batches, widest_input(checkpoint, what))
    places = find_places(model, names_of(checkpoint, what), attention=what != "mlp")
    return collect_reads(model, places, some_of(batches, _TOKENS), progress)


def factorise_whitened(
    checkpoint: Checkpoint, method: str, inputs: Mapping[str, Array], progress: Progress = quiet
) -> Factorisation:
    """Factorise the attention of every layer in the norm of its projection inputs, without gates or a fit."""
    layers: list[Factorised] = []
    for layer in range(checkpoint.n_layers):
        layer_inputs = Inputs(inputs[f"{layer}.x"], inputs[f"{layer}.y"])
        progress("factorising", layer, checkpoint.n_layers)
        projections = checkpoint.projections(layer)
        if method == "ttm":
            moments = {name: layer_inputs.reads(name, len(weight)) for name, weight in projections.weights.items()}
            layers.append(WeightedTTMatrices(projections, moments))
        else:
            layers.append(Whitened(method, projections, checkpoint.sizes, layer_inputs, turned=turns(checkpoint)))
    progress("factorising", checkpoint.n_layers, checkpoint.n_layers)
    n_before = sum(count_attention(checkpoint))
    return Factorisation(method, layers, n_before, measure_of_text(checkpoint), foretells=False)
