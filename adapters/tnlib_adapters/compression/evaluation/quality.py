"""Quality of a compressed model as a whole: on the task of a built-in model, or on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tnlib_adapters.architectures.table import ATTENTION_ONLY
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.evaluation.error_measures import Forecast
from tnlib_adapters.compression.evaluation.evaluate import Evaluation, evaluate_running
from tnlib_adapters.compression.methods.int8_baseline import round_weights
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import loss

_SEQUENCES = 200


def _loss_on_repeats(checkpoint: Checkpoint) -> float:
    """Return the loss in nats on the predictable part of held-out sequences."""
    tokens, repeated = repeated_segments(_SEQUENCES, rng=np.random.default_rng(2_000_000))
    return loss(checkpoint, tokens, repeated)


# model type -> (label, measure)
_MEASURES: Mapping[str, tuple[str, Callable[[Checkpoint], float]]] = {
    ATTENTION_ONLY.model_type: ("loss on repeated segments (nats)", _loss_on_repeats),
}


def measure_quality(before: Checkpoint, after: Checkpoint) -> dict[str, float]:
    """Return named measures of both checkpoints; {} if the model is not built in."""
    if before.architecture.model_type not in _MEASURES:
        return {}
    name, measure = _MEASURES[before.architecture.model_type]
    return {f"{name}, before": measure(before), f"{name}, after": measure(after)}


@dataclass(frozen=True)
class OnText:
    """Outputs of the compressed model, and of the original rounded to int8, compared with the original on a text."""

    after: Evaluation
    rounded: Evaluation

    def measures(self, forecast: Forecast) -> dict[str, float]:
        """Return the measures of the compressed model by name, and their predictions."""
        values = {f"{name}, on held-out text": value for name, value in self.after.measures().items()}
        if forecast.error is not None:
            name, value = (
                ("divergence", forecast.error) if self.after.cosine is None else ("cosine", 1 - forecast.error)
            )
            values[f"{name}, predicted without the fit"] = value
        return values


def measure_on_text(before: Checkpoint, after: Checkpoint, what: str, text: str, progress: Progress) -> OnText:
    """Evaluate the compressed checkpoint, and the original with the compressed part in int8, against the original."""
    from tnlib_adapters.instrument.running_model import open_running

    original, smaller = (open_running(checkpoint.folder.path) for checkpoint in (before, after))
    evaluation = evaluate_running(original, smaller, text, progress)
    rounded = round_weights(open_running(before.folder.path), what, names_of(before, what))
    return OnText(evaluation, evaluate_running(original, rounded, text, progress))
