"""Error measures of compressed models, and error forecasts of factorisations."""

from __future__ import annotations

from dataclasses import dataclass

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.residual_stream import unembedding

# error measures: without a text the root mean square over blocks, see `measured_error`; with a text, of model outputs
RELATIVE = "relative error"
COSINE = "1 - cosine"
DIVERGENCE = "divergence (nats a token)"


def measure_of_text(checkpoint: Checkpoint) -> str:
    """Return the error measure of this model on a text: of its predictions, or of its embeddings if it has none."""
    return COSINE if unembedding(checkpoint) is None else DIVERGENCE


@dataclass(frozen=True)
class Forecast:
    """Error that a factorisation predicts, at one size and along its whole curve, without fine-tuning.

    Parameters
    ----------
    measure
        Error measure: `RELATIVE`, `COSINE` or `DIVERGENCE`.
    error
        At the chosen size; None if the method cannot predict it before the fit.
    kept, errors
        The curve: fractions of the numbers, ascending, and errors.
    """

    measure: str = RELATIVE
    error: float | None = None
    kept: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
