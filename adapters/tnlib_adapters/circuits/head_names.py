"""Names of heads, and of the inputs through which a head reads other heads."""

from __future__ import annotations

from typing import Literal

from tnlib_adapters.attention.frozen.residual_product import Head

Kind = Literal["Q", "K", "V"]
READS: dict[Kind, str] = {"Q": "queries", "K": "keys", "V": "values"}  # what a head computes from its input


def head_name(head: Head) -> str:
    """Return the name of a head, "layer.head".

    >>> head_name((1, 3))
    '1.3'
    """
    return "{}.{}".format(*head)
