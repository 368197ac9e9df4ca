"""What an error is, and what a method says of it before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.residual_stream import unembedding

# what an error is: without a text the root mean square over blocks, see `measured_error`; with one, of the model
RELATIVE = "relative error"
COSINE = "1 - cosine"
DIVERGENCE = "divergence (nats a token)"


def measure_of_text(checkpoint: Checkpoint) -> str:
    """Return what an error of this model is on a text: of its predictions, or of its embeddings if it has none."""
    return COSINE if unembedding(checkpoint) is None else DIVERGENCE


@dataclass(frozen=True)
class Forecast:
    """The error that a factorisation predicts at one size and at all others, without a fit.

    Parameters
    ----------
    measure
        What the error is: `RELATIVE`, `COSINE` or `DIVERGENCE`.
    error
        At the size that was chosen; None where the method cannot tell before it has fitted.
    kept, errors
        The same along the whole curve, fractions of the numbers ascending.
    """

    measure: str = RELATIVE
    error: float | None = None
    kept: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
