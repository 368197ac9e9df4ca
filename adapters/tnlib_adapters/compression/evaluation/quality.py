"""What a compression does to the model as a whole: on the text of a built-in model, or on one that is held out."""

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
    """Return the loss in nats on the predictable part of sequences that the training never saw."""
    tokens, repeated = repeated_segments(_SEQUENCES, rng=np.random.default_rng(2_000_000))
    return loss(checkpoint, tokens, repeated)


# model type -> what to call the measure, and the measure
_MEASURES: Mapping[str, tuple[str, Callable[[Checkpoint], float]]] = {
    ATTENTION_ONLY.model_type: ("loss on repeated segments (nats)", _loss_on_repeats),
}


def measure_quality(before: Checkpoint, after: Checkpoint) -> dict[str, float]:
    """Return named measures of both checkpoints; {} where no text of the model is at hand."""
    if before.architecture.model_type not in _MEASURES:
        return {}
    name, measure = _MEASURES[before.architecture.model_type]
    return {f"{name}, before": measure(before), f"{name}, after": measure(after)}


@dataclass(frozen=True)
class OnText:
    """A compressed model, and the original with its weights rounded to int8, each beside the original on a text."""

    after: Evaluation
    rounded: Evaluation

    def measures(self, forecast: Forecast) -> dict[str, float]:
        """Return the numbers of the compressed model by name, and what was predicted of them."""
        found = {f"{name}, on held-out text": value for name, value in self.after.measures().items()}
        if forecast.error is not None:
            name, value = (
                ("divergence", forecast.error) if self.after.cosine is None else ("cosine", 1 - forecast.error)
            )
            found[f"{name}, predicted without the fit"] = value
        return found


def measure_on_text(before: Checkpoint, after: Checkpoint, what: str, text: str, progress: Progress) -> OnText:
    """Run both checkpoints, and the first with what is compressed rounded to int8, on a text."""
    from tnlib_adapters.instrument.running_model import open_running

    original, smaller = (open_running(one.folder.path) for one in (before, after))
    found = evaluate_running(original, smaller, text, progress)
    rounded = round_weights(open_running(before.folder.path), what, names_of(before, what))
    return OnText(found, evaluate_running(original, rounded, text, progress))
