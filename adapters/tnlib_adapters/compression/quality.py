"""What a compression does to the model as a whole, for models whose text is at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.architectures import ATTENTION_ONLY
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.forward.model import loss

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
