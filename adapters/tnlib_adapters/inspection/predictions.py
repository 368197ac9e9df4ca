"""Predictions of a model on the inspected text, and which components decide the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.circuits.paths.logit_paths import logit_contributions
from tnlib_adapters.circuits.tokens.largest_logits import largest_logits
from tnlib_adapters.frozen.frozen_model import freeze
from tnlib_adapters.reference.layers import normed
from tnlib_adapters.reference.weights import Weights
from tnlib_adapters.result_table import descending

_N_BEST = 3


@dataclass(frozen=True, eq=False)
class Predictions:
    """Next tokens after every position of a text, and direct contributions to the last prediction.

    Parameters
    ----------
    names
        Per position, the three most probable next tokens, in descending order.
    probabilities
        (n, 3), their probabilities.
    difference
        Logit of the first less that of the second token after the last position.
    components
        Heads ("0.3") and feed-forward layers ("mlp 0") with their direct contributions to `difference`, the largest in
        modulus first.
    """

    names: Sequence[Sequence[str]]
    probabilities: Array
    difference: float
    components: Sequence[tuple[str, float]]


def predictions(weights: Weights, tokens: Array, name: Callable[[int], str]) -> Predictions | None:
    """Return the predictions of a causal model on one sequence; None without an unembedding of three tokens or more."""
    if weights.unembed is None:
        return None
    frozen = freeze(weights, tokens)
    logits = weights.unembed(normed(frozen.norm, frozen.blocks[-1].stream_after))  # n vocab
    if logits.shape[1] < _N_BEST:
        return None
    best, probabilities = largest_logits(logits, _N_BEST)
    contributions = logit_contributions(frozen, (int(best[-1, 0]), int(best[-1, 1])))
    components = [
        (contributions.names[k], float(contributions.direct[k])) for k in descending(np.abs(contributions.direct))
    ]
    names = [[name(int(token)) for token in row] for row in best]
    return Predictions(names, probabilities, contributions.total, components)
