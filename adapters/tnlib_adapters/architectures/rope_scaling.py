"""Rotary embedding frequencies from config.json, for transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.architecture import Architecture, Rope, Settings
from tnlib_adapters.architectures.config_keys import LAYER_TYPES
from tnlib_adapters.architectures.layer_settings import layer_type


@dataclass(frozen=True)
class Frequencies:
    """Frequencies and scaling of rotary embeddings."""

    radians: Array  # (F,), rotation angle of each plane per position
    factor: float  # factor of the rotated part of queries and keys
    context: int | None  # largest number of positions, None if unlimited


def read_frequencies(
    row: Architecture, settings: Settings, d_head: int, length: int | None, function: str, *, layer: int = 0
) -> Frequencies | None:
    """Return the frequencies of a layer for sequences of `length` tokens, None if the model does not rotate.

    `length` matters for the variants "dynamic" and "longrope"; without it, the frequencies are those for sequences no
    longer than in training.

    Raises
    ------
    FileFormatError
        If the variant is unknown, or a number that it requires is missing.
    ArgumentError
        If `length` exceeds the context.
    """
    rope = row.rope
    if rope is None or (rope.unless is not None and settings[rope.unless]):
        return None
    section = _section(rope, settings, layer, function)
    kind = section.get("rope_type", section.get("type", "default"))
    if kind in ("su", "yarn") and "long_factor" in section:  # former names of longrope
        kind = "longrope"
    if kind not in VARIANTS:
        raise FileFormatError(
            f"{function}: rope_type in config.json must be one of {', '.join(VARIANTS)}, got {kind!r:.80}; "
            "this way of scaling rotary embeddings is not known yet."
        )
    request = _RopeArguments(
        section=section,
        function=function,
        base=section.get("rope_theta", settings[rope.theta]),
        n_columns=_n_columns(rope, settings, section, d_head, function),
        context=settings[row.context] if row.context else None,
        trained=settings["original_max_position_embeddings"],
        length=length,
    )
    if length is not None and request.context is not None and length > max(request.context, _reach(request, kind)):
        raise ArgumentError(
            f"{function}: length must not exceed the context of {request.context} positions, got {length}; "
            "the model was not made for longer sequences."
        )
    return VARIANTS[kind](request)


def _section(rope: Rope, settings: Settings, layer: int, function: str) -> Mapping[str, Any]:
    """Return the section on rotary embeddings of one layer, whichever version of transformers wrote it."""
    section: Mapping[str, Any] = settings["rope_parameters"]
    kind, of_types = layer_type(settings, layer), [name for name in LAYER_TYPES if name in section]
    if not of_types:
        sliding_theta = rope.sliding_theta if kind == "sliding_attention" else None
        return {"rope_theta": settings[sliding_theta]} if sliding_theta else section
    if kind not in of_types:
        raise FileFormatError(
            f"{function}: rotary embeddings in config.json must be stated for all layers, got {of_types[0]!r} "
            f"and nothing for {kind!r}; repair it."
        )
    of_type: Mapping[str, Any] = section[kind]
    return of_type


@dataclass(frozen=True)
class _RopeArguments:
    section: Mapping[str, Any]
    function: str
    base: float
    n_columns: int
    context: int | None
    trained: float | None
    length: int | None

    def number(self, key: str) -> float:
        """Return a number that config.json must contain."""
        if key not in self.section:
            raise FileFormatError(
                f"{self.function}: {key} of the rotary embeddings in config.json must be stated, found none; repair it."
            )
        value: float = self.section[key]
        return value

    def original(self) -> float:
        """Return the context length of the training."""
        length = self.trained or self.section.get("original_max_position_embeddings") or self.context
        if length is None or length < 2:
            raise FileFormatError(
                f"{self.function}: original_max_position_embeddings of the rotary embeddings in config.json must be "
                f"stated, at least 2, got {length}; repair it."
            )
        return float(length)

    def plain(self, base: float | None = None) -> Array:
        """Return the unscaled frequencies, base^(-2f / n_columns) for plane f."""
        exponents: Array = np.arange(0, self.n_columns, 2) / self.n_columns
        return (self.base if base is None else base) ** -exponents


def _n_columns(rope: Rope, settings: Settings, section: Mapping[str, Any], d_head: int, function: str) -> int:
    if rope.n_columns is not None:
        n: int = settings[rope.n_columns]
    else:
        fraction = section.get("partial_rotary_factor", settings[rope.fraction])
        n = int(d_head * (rope.fraction_default if fraction is None else fraction))
    if n % 2 or not 0 < n <= d_head:
        raise FileFormatError(
            f"{function}: config.json must rotate an even number of at most {d_head} columns of a head, got {n}; "
            "repair it."
        )
    return n


def _reach(request: _RopeArguments, kind: str) -> float:
    """Return the longest sequence length that scaling allows, where it exceeds the context in the config."""
    if kind == "dynamic":
        return math.inf
    return request.original() * float(request.section.get("factor", 1.0)) if kind == "yarn" else 0


def _default(request: _RopeArguments) -> Frequencies:
    return Frequencies(request.plain(), 1.0, request.context)


def _linear(request: _RopeArguments) -> Frequencies:
    return Frequencies(request.plain() / request.number("factor"), 1.0, request.context)


def _dynamic(request: _RopeArguments) -> Frequencies:
    """Dynamic NTK scaling: the base grows with sequences longer than the context."""
    if request.context is None or request.length is None or request.length <= request.context:
        return _default(request)
    factor, n = request.number("factor"), request.n_columns
    if n < 4:
        raise FileFormatError(
            f"{request.function}: config.json must rotate at least 4 columns of a head where rope_type is 'dynamic', "
            f"got {n}; repair it."
        )
    stretch = factor * request.length / request.context - (factor - 1)
    return Frequencies(request.plain(request.base * stretch ** (n / (n - 2))), 1.0, request.length)


def _llama3(request: _RopeArguments) -> Frequencies:
    """Divide low frequencies by `factor`, keep high ones, interpolate in between."""
    factor, slow, fast = (request.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if not slow < fast:
        raise FileFormatError(
            f"{request.function}: low_freq_factor of the rotary embeddings in config.json must be less than "
            f"high_freq_factor, got {slow:g} and {fast:g}; repair it."
        )
    radians = request.plain()
    turns = request.original() * radians / (2 * math.pi)  # over a sequence of training length
    weight = np.clip((turns - slow) / (fast - slow), 0, 1)
    return Frequencies((1 - weight) * radians / factor + weight * radians, 1.0, request.context)


def _yarn(request: _RopeArguments) -> Frequencies:
    """Divide frequencies with fewer than `beta_slow` turns in training by `factor`, keep those above `beta_fast`.

    References
    ----------
    Peng, Quesnelle, Fan, Shippole, "YaRN" (ICLR 2024), sections 3.2 and 3.4.
    """
    section, n, original = request.section, request.n_columns, request.original()
    factor = section.get("factor", (request.context or original) / original)

    def plane(turns: float) -> float:
        """Return the plane, as a real number, with this number of turns."""
        return n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(request.base))

    first, last = plane(section.get("beta_fast") or 32.0), plane(section.get("beta_slow") or 1.0)
    if section.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n - 1)
    last = last + 0.001 if first == last else last
    slowed = np.clip((np.arange(n // 2) - first) / (last - first), 0, 1)
    radians = request.plain()
    context = max(request.context or 0, int(original * factor))
    attention_factor = section.get("attention_factor", _yarn_factor(section, factor))
    return Frequencies(slowed * radians / factor + (1 - slowed) * radians, attention_factor, context)


def _yarn_factor(section: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if section.get("mscale") and section.get("mscale_all_dim"):
        return magnitude(section["mscale"]) / magnitude(section["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(request: _RopeArguments) -> Frequencies:
    """Divide every frequency by its own factor, from one list up to the training length and another beyond."""
    original = request.original()
    long = request.length is not None and request.length > original
    key = "long_factor" if long else "short_factor"
    each = request.section.get(key)
    if each is None or len(each) != request.n_columns // 2:
        raise FileFormatError(
            f"{request.function}: {key} in config.json must list {request.n_columns // 2} numbers, one per plane, "
            f"got {'none' if each is None else len(each)}; repair it."
        )
    context = request.context if long else min(int(original), request.context or int(original))
    factor = request.section.get("factor", (request.context or original) / original)
    by_length = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention_factor = request.section.get("attention_factor", by_length)
    return Frequencies(request.plain() / np.asarray(each, float), attention_factor, context)


VARIANTS: Mapping[str, Callable[[_RopeArguments], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
