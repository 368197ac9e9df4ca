"""A compressed model as a smaller model of some architecture: interface of the layouts, and what several refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import AttentionWiring, LayerWiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.statistics import ComponentsOf, Statistics
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.request import Progress
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.files.tensor_file import TensorInfo

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.weight_inputs import Places


class SmallerLayers(Protocol):
    """Layers of a smaller model: chosen layer by layer from their statistics, then fitted."""

    @property
    def widest_input(self) -> int:
        """Largest number of inputs whose second moments are inverted."""

    @property
    def gated(self) -> ComponentsOf | None:
        """Function that returns the components on which gates are measured, None for none."""

    def places(self, model: RunningModel) -> Places:
        """Return the weights whose inputs and output gradients `choose` reads."""

    def choose(self, k: int, statistics: Statistics) -> None:
        """Choose what layer k keeps."""

    def start(self, k: int) -> Products:
        """Return the weights of layer k, as chosen."""

    def fit(self, model: RunningModel, streams: Streams, n_steps: int, progress: Progress) -> Iterator[Products]:
        """Yield the fitted weights of every layer, after all are chosen."""


Layers = TypeVar("Layers", bound=SmallerLayers)


class SmallerModel(Protocol[Layers]):
    """A layout for one checkpoint, made from it and a `LayoutRequest`.

    Attributes
    ----------
    what
        Part of the model that becomes smaller, a key of `SUBJECTS` of the report.
    """

    what: str

    def layers(self, workspace: Workspace) -> Layers:
        """Return the layers, to be chosen and fitted."""

    def config(self, layers: Layers) -> dict[str, Any]:
        """Return the content of config.json."""

    def copied(self) -> Mapping[str, TensorInfo]:
        """Return the tensors that are copied, by their new names."""

    def scaled(self) -> Mapping[str, float]:
        """Return the factors of copied tensors, by their new names, where they are not 1."""

    def tensors(self, k: int, layers: Layers, products: Products) -> dict[str, Array]:
        """Return the other tensors of layer k, by their names."""


# ------------------------------------------------------------------------------------------------------- refusals

Reasons = Mapping[str, Callable[[AttentionWiring], bool]]

# reason to refuse -> test of the attention of a layer
HEADS_OF_OTHER_KINDS: Reasons = {
    "its keys and values are made from latent vectors": lambda a: a.latent is not None,
    "its queries and keys are normalised": lambda a: bool(a.head_norms),
    "it has no rotary embeddings": lambda a: a.frequencies(None, "compress") is None,
    "its rotary embeddings rotate adjacent columns": lambda a: a.pairs,
    "its rotary embeddings are scaled other than linearly": lambda a: rope_of(a) is None,
}


def first_reason(layers: Iterator[LayerWiring] | tuple[LayerWiring, ...], reasons: Reasons) -> str | None:
    """Return the first reason that applies to a layer, or None."""
    attentions = [layer.attention for layer in layers]
    return next((reason for reason, applies in reasons.items() if any(map(applies, attentions))), None)


def refuse(layout: str, checkpoint: Checkpoint, reason: str, advice: str = "use layout 'factored' or 'dense'") -> None:
    """Raise for a model that a layout cannot hold."""
    raise ArgumentError(
        f"compress: layout {layout!r} cannot hold this {checkpoint.wiring.model_type}, because {reason}; {advice}."
    )


def rope_of(attention: AttentionWiring) -> tuple[float, float] | None:
    """Return base b and factor f of frequencies b^(-2j / n) / f of n columns; None for others, or that vary."""
    turning = attention.frequencies(None, "compress")
    if turning is None or turning.factor != 1:
        return None
    n, radians = len(turning.radians), np.asarray(turning.radians, float)
    base = _rounded((radians[0] / radians[1]) ** n) if n > 1 else 1e4  # any, for one plane
    if not np.allclose(radians, radians[0] * base ** (-np.arange(n) / n), rtol=1e-9) or _varies(attention, radians):
        return None
    return base, _rounded(1 / radians[0])


def _varies(attention: AttentionWiring, radians: Array) -> bool:
    """Test if frequencies are others beyond the context, as those of the dynamic variant."""
    if attention.context is None:
        return False
    try:
        longer = attention.frequencies(attention.context + 1, "compress")
    except ArgumentError:  # no model of such length
        return False
    return longer is not None and not np.array_equal(longer.radians, radians)


def _rounded(value: float) -> float:
    """Return a number with 12 digits: what config.json stated, freed from the rounding of powers."""
    return float(f"{value:.12g}")


def sees_all(attention: AttentionWiring) -> bool:
    """Test if no window shortens the context."""
    return attention.window is None or (attention.context is not None and attention.window >= attention.context)


def has_default_scale(attention: AttentionWiring) -> bool:
    """Test if scores are divided by the root of the width of a head."""
    return math.isclose(attention.scale, attention.sizes.d_head**-0.5, rel_tol=1e-9)
