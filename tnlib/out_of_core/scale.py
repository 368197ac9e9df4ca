"""The power of two by which a source is divided, so that products of its entries stay in range."""

from __future__ import annotations

import math

from tnlib.linalg.scaling import in_safe_range, shift
from tnlib.out_of_core.array_source import ArraySource
from tnlib.out_of_core.leg_reduction import LegSVD


def set_scale(source: ArraySource, spectrum: LegSVD) -> LegSVD:
    """Set the exponent of `source` by its norm in `spectrum`, and return `spectrum` at that scale."""
    if spectrum.norm > 0 and not (spectrum.exponent == 0 and in_safe_range(spectrum.norm, source.size, source.dtype)):
        source.exponent = spectrum.exponent + math.frexp(spectrum.norm)[1]
    by = spectrum.exponent - source.exponent
    svd = spectrum.svd._replace(s=shift(spectrum.svd.s, by), error_estimate=math.ldexp(spectrum.svd.error_estimate, by))
    return LegSVD(svd, math.ldexp(spectrum.norm, by), 0)
