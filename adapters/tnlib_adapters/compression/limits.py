"""Limits of the memory of a compression, which trade it for time and disk."""

from __future__ import annotations

from dataclasses import dataclass

from tnlib_adapters.compression.methods.out_of_core import CACHE_BYTES
from tnlib_adapters.files.process_memory import BATCH_TOKENS, WEIGHTS


@dataclass(frozen=True)
class Limits:
    """Limits of the memory of a compression.

    Parameters
    ----------
    tokens
        Tokens of a batch of a text; one text is never split.
    cache
        Bytes of factors that are not in use; those beyond are in temporary files.
    weights
        Bytes of weights of a running model, in float32; those of a larger model are read again in every pass.
    """

    tokens: int = BATCH_TOKENS
    cache: int = CACHE_BYTES
    weights: int = WEIGHTS
