"""Choose the limits of a compression for a given peak memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tnlib import ArgumentError
from tnlib_adapters.compression.cost.memory import peak_memory_of
from tnlib_adapters.compression.cost.passes import Tokens
from tnlib_adapters.compression.cost.shapes import Shapes
from tnlib_adapters.compression.limits import Limits
from tnlib_adapters.compression.request import Request

_FEWEST_TOKENS = 32  # of a batch


def choose_limits(shapes: Shapes, request: Request, tokens: Tokens, libraries: int) -> Limits:
    """Return the largest limits with which the estimated peak memory is within `max_memory`.

    Factors go to disk first, which costs least; then weights are read again in every pass; batches become smaller last,
    because the result depends on them.

    Parameters
    ----------
    shapes, request
        The model and the options; the defaults are returned if `max_memory` is None.
    tokens
        Tokens of the text at the default limits.
    libraries
        Resident memory before any array is made, in bytes.

    Raises
    ------
    ArgumentError
        If even the smallest limits exceed it; states the least possible value.
    """
    if request.max_memory is None:
        return Limits()
    least = math.inf
    for limits in _candidates(with_text=request.calibrate is not None):
        peak = max(peak_memory_of(shapes, request, tokens_within(tokens, limits), limits, libraries).values())
        if peak <= request.max_memory:
            return limits
        least = min(least, peak)
    megabytes = math.ceil(least / 1e6)
    raise ArgumentError(
        f"compress: max_memory must be at least {megabytes}M, that is {megabytes * 10**6:,} bytes, for this model and "
        f"these options, got {request.max_memory:,} bytes; allow more, or choose a smaller part by what."
    )


def tokens_within(tokens: Tokens, limits: Limits) -> Tokens:
    """Return the tokens that are read with batches within these limits."""
    return replace(tokens, batch=min(tokens.batch, max(limits.tokens, tokens.longest)))


def _candidates(*, with_text: bool) -> Iterator[Limits]:
    """Yield limits from the defaults on down, in the order in which they are tried."""
    largest = Limits()
    tokens = largest.tokens
    while tokens >= (_FEWEST_TOKENS if with_text else largest.tokens):
        for weights in _halved(largest.weights) if with_text else (largest.weights,):
            for cache in _halved(largest.cache):
                yield Limits(tokens, cache, weights)
        tokens //= 2


def _halved(largest: int) -> Iterator[int]:
    """Yield a number of bytes, its halves down to a sixteenth, and 0."""
    yield from (largest >> k for k in range(5))
    yield 0
