"""The frequencies of rotary embeddings as a config states them, in the words of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.architecture import Architecture, Config
from tnlib_adapters.architectures.config_rules import layer_type


@dataclass(frozen=True)
class Frequencies:
    """What a config says of the rotation.

    Parameters
    ----------
    radians
        (F,), by which each plane turns from one position to the next.
    factor
        Of the rotated part of queries and of keys.
    context
        Count of positions up to which they hold, None if any.
    """

    radians: Array
    factor: float
    context: int | None


def read_frequencies(
    row: Architecture, config: Config, d_head: int, length: int | None, function: str, *, layer: int = 0
) -> Frequencies | None:
    """Return the frequencies of a layer for sequences of `length` tokens, None if the model does not rotate.

    `length` matters where they depend on it ("dynamic", "longrope"); without it they are those of sequences no
    longer than in training.

    Raises
    ------
    FileFormatError
        If the variant is not known, or a number that it needs is missing.
    ArgumentError
        If `length` exceeds the context.
    """
    rope = row.rope
    if rope is None or (rope.unless is not None and config.get(rope.unless, False)):
        return None
    told = _parameters(row, config, layer, function)
    kind = told.get("rope_type", told.get("type", "default"))
    if kind in ("su", "yarn") and "long_factor" in told:  # what longrope was called when Phi-3 came out
        kind = "longrope"
    if kind not in tuple(VARIANTS):
        raise FileFormatError(
            f"{function}: rope_type in config.json must be one of {', '.join(VARIANTS)}, got {kind!r}; "
            "this way of scaling rotary embeddings is not known yet."
        )
    asked = _Asked(
        told=told,
        function=function,
        base=float(told.get("rope_theta") or row.get(config, rope.theta) or 10000.0),
        n_columns=_n_columns(row, config, told, d_head, function),
        context=row.get(config, row.context) if row.context else None,
        trained=config.get("original_max_position_embeddings"),
        length=length,
    )
    if length is not None and asked.context is not None and length > max(asked.context, _reach(asked, kind)):
        raise ArgumentError(
            f"{function}: length must not exceed the context of {asked.context} positions, got {length}; "
            "the model was not made for longer sequences."
        )
    return VARIANTS[kind](asked)


def _parameters(row: Architecture, config: Config, layer: int, function: str) -> Mapping[str, Any]:
    """Return the section on rotary embeddings of one layer, whichever version of transformers wrote it."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(section, Mapping):
        return {"rope_type": section}
    by_type = {key: value for key, value in section.items() if isinstance(value, Mapping)}
    kind = layer_type(config, layer)
    if not by_type:
        sliding = row.rope.sliding_theta if row.rope and kind == "sliding_attention" else None
        return {"rope_theta": row.get(config, sliding)} if sliding else section
    if kind not in by_type:
        raise FileFormatError(
            f"{function}: rotary embeddings in config.json must be stated for all layers, got {next(iter(by_type))!r} "
            f"and nothing for {kind!r}; repair it."
        )
    return by_type[kind]


@dataclass(frozen=True)
class _Asked:
    told: Mapping[str, Any]
    function: str
    base: float
    n_columns: int
    context: int | None
    trained: int | None
    length: int | None

    def number(self, key: str) -> float:
        """Return a positive number that config.json must state."""
        value = self.told.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise FileFormatError(
                f"{self.function}: {key} of the rotary embeddings in config.json must be a positive number, "
                f"got {value!r}; repair it."
            )
        return float(value)

    def original(self) -> float:
        """Return the length of sequences in training."""
        known = self.trained or self.told.get("original_max_position_embeddings") or self.context
        if known is None:
            raise FileFormatError(
                f"{self.function}: original_max_position_embeddings of the rotary embeddings must be stated in "
                "config.json, found none; repair it."
            )
        return float(known)

    def plain(self, base: float | None = None) -> Array:
        """Return the frequencies before any scaling, base^(-2f / n_columns) of plane f."""
        exponents: Array = np.arange(0, self.n_columns, 2) / self.n_columns
        return (self.base if base is None else base) ** -exponents


def _n_columns(row: Architecture, config: Config, told: Mapping[str, Any], d_head: int, function: str) -> int:
    rope = row.rope
    if rope is None:
        return 0
    if rope.n_columns is not None:
        n = row.stated(config, rope.n_columns)
    else:
        fraction = told.get("partial_rotary_factor", config.get(rope.fraction))
        n = int(d_head * (rope.fraction_default if fraction is None else fraction))
    if type(n) is not int or n % 2 or not 0 < n <= d_head:
        raise FileFormatError(
            f"{function}: config.json must rotate an even number of at most {d_head} columns of a head, got {n!r}; "
            "repair it."
        )
    return n


def _reach(asked: _Asked, kind: str) -> float:
    """Return how long sequences may become beyond what the config calls its context."""
    if kind == "dynamic":
        return math.inf
    return asked.original() * float(asked.told.get("factor") or 1) if kind == "yarn" else 0


def _default(asked: _Asked) -> Frequencies:
    return Frequencies(asked.plain(), 1.0, asked.context)


def _linear(asked: _Asked) -> Frequencies:
    return Frequencies(asked.plain() / asked.number("factor"), 1.0, asked.context)


def _dynamic(asked: _Asked) -> Frequencies:
    """NTK scaling: the base grows with sequences that are longer than the context."""
    if asked.context is None or asked.length is None or asked.length <= asked.context:
        return _default(asked)
    factor, n = asked.number("factor"), asked.n_columns
    stretch = factor * asked.length / asked.context - (factor - 1)
    return Frequencies(asked.plain(asked.base * stretch ** (n / (n - 2))), 1.0, asked.length)


def _llama3(asked: _Asked) -> Frequencies:
    """Slow planes are slowed down by `factor`, fast ones left alone, those between interpolated."""
    factor, slow, fast = (asked.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    radians = asked.plain()
    turns = asked.original() * radians / (2 * math.pi)  # over a sequence of training
    kept = np.clip((turns - slow) / (fast - slow), 0, 1)
    return Frequencies((1 - kept) * radians / factor + kept * radians, 1.0, asked.context)


def _yarn(asked: _Asked) -> Frequencies:
    """Planes that turn less than `beta_slow` times in training are slowed down, those above `beta_fast` are not.

    References
    ----------
    Peng, Quesnelle, Fan, Shippole, "YaRN" (ICLR 2024), sections 3.2 and 3.4.
    """
    told, n, original = asked.told, asked.n_columns, asked.original()
    factor = asked.number("factor") if told.get("factor") is not None else (asked.context or original) / original

    def plane(turns: float) -> float:
        """Return the plane, as a real number, that turns so often."""
        return n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(asked.base))

    first, last = plane(float(told.get("beta_fast") or 32)), plane(float(told.get("beta_slow") or 1))
    if told.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n - 1)
    last = last + 0.001 if first == last else last
    slowed = np.clip((np.arange(n // 2) - first) / (last - first), 0, 1)
    radians = asked.plain()
    context = max(asked.context or 0, int(original * factor))
    return Frequencies(slowed * radians / factor + (1 - slowed) * radians, _yarn_factor(told, factor), context)


def _yarn_factor(told: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if told.get("attention_factor") is not None:
        return float(told["attention_factor"])
    if told.get("mscale") and told.get("mscale_all_dim"):
        return magnitude(told["mscale"]) / magnitude(told["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(asked: _Asked) -> Frequencies:
    """Every plane has a factor of its own, one for sequences no longer than in training and one for others."""
    original = asked.original()
    long = asked.length is not None and asked.length > original
    key = "long_factor" if long else "short_factor"
    each = asked.told.get(key)
    if not isinstance(each, list | tuple) or len(each) != asked.n_columns // 2:
        raise FileFormatError(
            f"{asked.function}: {key} in config.json must list {asked.n_columns // 2} numbers, one per plane, "
            f"got {each!r:.80}; repair it."
        )
    context = asked.context if long else min(int(original), asked.context or int(original))
    return Frequencies(asked.plain() / np.asarray(each, float), _longrope_factor(asked, original), context)


def _longrope_factor(asked: _Asked, original: float) -> float:
    if asked.told.get("attention_factor") is not None:
        return float(asked.told["attention_factor"])
    factor = asked.told.get("factor") or (asked.context or original) / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


VARIANTS: Mapping[str, Callable[[_Asked], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
