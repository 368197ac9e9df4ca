r"""Similarity of the QK and OV operators of all pairs of heads, from their factors.

For operators A = L R and B = L' R' of the residual stream the Frobenius inner product needs no d x d array:

    <A, B> = tr A^T B = sum of (L^T L') * (R R'^T),    cosine = <A, B> / (||A|| ||B||),    from -1 to 1.

If independent uniformly random rotations of n dimensions turn the inputs and the outputs of B, the cosine has mean 0
and standard deviation 1 / n, because E (tr A^T U B V)^2 = ||A||^2 ||B||^2 / n^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from tnlib._typing import Array
from tnlib._validate import as_count, check_choice
from tnlib.linalg.threads import parallel_matmul, single_threaded_blas
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, check_form
from tnlib_adapters.circuits.arguments import as_folded_layers, head_name
from tnlib_adapters.circuits.composition.head_subspaces import largest_pairs
from tnlib_adapters.circuits.composition.pair_norms import quotient
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.result_table import Columns, Table

Operator = Literal["QK", "OV"]


@dataclass(frozen=True, eq=False, repr=False)
class Similarities(Table):
    """Cosines between the operators of all pairs of heads, returned by `operator_similarities`.

    Parameters
    ----------
    operator
        "QK" or "OV".
    cosines
        (layers, heads, layers, heads): 1 for proportional operators, negative for opposite ones; 0 for a zero operator.
    deviation
        Standard deviation of the cosine for random rotations between the two heads; its mean is 0.
    group_size
        Number of query heads with common keys and values, whose operators share a factor; such pairs come last.
    notes
        Sentences on norms that were folded into the heads, or could not be.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = operator_similarities(model, "OV")
    >>> first, second, cosine = found.largest(1)[0]
    >>> first, second, f"{cosine:.2f}"
    ((1, 0), (1, 3), '0.36')
    """

    operator: Operator
    cosines: Array
    deviation: float
    group_size: int = 1
    notes: tuple[str, ...] = ()

    _FORMATS: ClassVar = {"sigma": "+.0f", "cosine": "+.3f"}
    _SHOWN = 10

    def largest(self, n: int) -> list[tuple[Head, Head, float]]:
        """Return the n pairs of different heads with the largest cosine by modulus, every pair once."""
        at = self._at(slice(as_count("Similarities.largest", "n", n, least=0)))
        rows = zip(*(indices.tolist() for indices in at), self.cosines[at].tolist(), strict=True)
        return [((a, b), (c, d), cosine) for a, b, c, d, cosine in rows]

    def _at(self, rows: Any) -> tuple[Array, ...]:
        """Return the indices of pairs of heads by the modulus of their cosine, pairs of a group last."""
        layers, heads = np.ogrid[: self.cosines.shape[0], : self.cosines.shape[1]]
        group = layers * heads.size + heads // self.group_size
        strengths = np.where(np.equal.outer(group, group), -1.0, np.abs(self.cosines))
        return np.unravel_index(largest_pairs(strengths, every=False)[rows], self.cosines.shape)

    @property
    def _title(self) -> str:
        return f"Similarities of {self.operator} operators, chance 0 +- {self.deviation:.4f}"

    def _columns(self, rows: Any) -> Columns:
        at = self._at(rows)
        first, second = ([head_name(head) for head in zip(*side, strict=True)] for side in (at[:2], at[2:]))
        cosines = self.cosines[at]
        return {"first": first, "second": second, "cosine": cosines, "sigma": cosines / self.deviation}


@accepts_models
@single_threaded_blas
def operator_similarities(
    model: Checkpoint | Sequence[Attention],
    operator: Operator = "OV",
    *,
    distance: int | None = None,
    centred: bool | None = None,
) -> Similarities:
    """Return the cosines between the QK or OV operators of all pairs of heads, biases left out.

    Parameters
    ----------
    model
        A checkpoint or transformers model, or attention layers. Norms before the attention of a model are folded, as in
        `compositions`.
    operator
        "OV" compares what heads move, "QK" what they match.
    distance
        Query position minus key position, for "QK" where scores depend on it.
    centred
        Whether the mean over features is projected out of what heads read and write, as in `compositions`.

    Returns
    -------
    Similarities
        Printed as a table of the largest cosines by modulus.

    Raises
    ------
    ArgumentError
        If layers differ in shape, or the distance is missing.

    Examples
    --------
    The induction heads of the built-in model match alike:

    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = operator_similarities(model, "QK")
    >>> first, second, cosine = found.largest(1)[0]
    >>> first, second, f"{cosine:.2f}, standard deviation {found.deviation:.3f}"
    ((1, 0), (1, 3), '0.77, standard deviation 0.016')
    """
    function = "operator_similarities"
    check_choice(function, "operator", operator, get_args(Operator))
    layers, centred, notes, _ = as_folded_layers(function, model, centred)
    if operator == "QK":
        for layer in layers:
            check_form(function, layer, distance)
    factors = [_factors(layer, operator, distance, centred) for layer in layers]
    shape = (len(layers), layers[0].n_heads)
    products = np.zeros((*shape, *shape))
    for j, (left, right) in enumerate(factors):
        for k, (other_left, other_right) in enumerate(factors[j:], j):
            blocks = parallel_matmul(left, other_left.T) * parallel_matmul(right, other_right.T)  # (h r) [d] (h r)
            products[j, :, k] = blocks.reshape(shape[1], -1, shape[1], len(left) // shape[1]).sum(axis=(1, 3))
            products[k, :, j] = products[j, :, k].T
    norms = np.sqrt(np.diagonal(products.reshape(len(layers) * shape[1], -1))).reshape(shape)
    cosines = quotient(products, np.multiply.outer(norms, norms))
    deviation = 1 / (layers[0].d_model - int(centred))
    return Similarities(operator, cosines, deviation, layers[0].group_size, notes)


def _factors(layer: Attention, operator: Operator, distance: int | None, centred: bool) -> tuple[Array, Array]:
    """Return the factors of all heads as rows, ((heads r), d_model) each: of inputs or queries, and the other side."""
    operators = [layer.ov(h) if operator == "OV" else layer.qk(h, distance) for h in range(layer.n_heads)]
    pair = []
    for rows in ([a.left[:-1].T for a in operators], [a.right[:, :-1] for a in operators]):
        stacked = np.concatenate(rows)
        pair.append(stacked - stacked.mean(axis=1, keepdims=True) if centred else stacked)
    return pair[0], pair[1]
