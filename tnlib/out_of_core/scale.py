"""The power of two by which a source is divided, so that products of its entries stay in range."""

from __future__ import annotations

import math

from tnlib.linalg.scaling import in_safe_range, shift
from tnlib.out_of_core.array_source import ArraySource
from tnlib.out_of_core.leg_reduction import LegSVD


def set_scale(source: ArraySource, found: LegSVD) -> LegSVD:
    """Set the exponent of `source` by its norm in `found`, and return `found` at that scale."""
    if found.norm > 0 and not (found.exponent == 0 and in_safe_range(found.norm, source.size, source.dtype)):
        source.exponent = found.exponent + math.frexp(found.norm)[1]
    by = found.exponent - source.exponent
    svd = found.svd._replace(s=shift(found.svd.s, by), error_estimate=math.ldexp(found.svd.error_estimate, by))
    return LegSVD(svd, math.ldexp(found.norm, by), 0)
