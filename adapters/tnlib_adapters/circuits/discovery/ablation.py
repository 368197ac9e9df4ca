"""Ablation of edges: the values that replace what a reader no longer receives, and the metric of the effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import check_choice
from tnlib_adapters.reference.embedding import TokenEmbedding

AblationKind = Literal["zero", "mean", "resample"]
Metric = Literal["loss", "kl"]


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
        of the whole model.
    corrupted
        For "resample", the other tokens, of the shape of the given ones. None: every sequence receives the outputs of
        the next sequence of the batch.

    Raises
    ------
    ArgumentError
        If a name is unknown, or `corrupted` is given for another kind than "resample".

    References
    ----------
    F. Zhang and N. Nanda, "Towards Best Practices of Activation Patching in Language Models" (2024).

    Examples
    --------
    >>> Ablation("resample", metric="kl")
    Ablation(kind='resample', metric='kl', corrupted=None)
    """

    kind: AblationKind = "zero"
    metric: Metric = "loss"
    corrupted: Any = None

    def __post_init__(self) -> None:
        for name, value, choices in (("kind", self.kind, AblationKind), ("metric", self.metric, Metric)):
            check_choice("Ablation", name, value, get_args(choices))
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
