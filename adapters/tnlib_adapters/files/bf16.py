"""bfloat16 in numpy, which has no such dtype: the upper half of a float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the float32 values of bfloat16 bit patterns, exactly.

    >>> from_bf16(np.array([0x3F80, 0xC000], np.uint16))
    array([ 1., -2.], dtype=float32)
    """
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint16]:
    """Return the bfloat16 bit patterns nearest to `values`, ties to even; NaN stays NaN.

    >>> [hex(int(b)) for b in to_bf16(np.array([1.0, 1.00390625, 1.01171875], np.float32))]
    ['0x3f80', '0x3f80', '0x3f82']
    """
    bits = np.asarray(values, np.float32).view(np.uint32)
    # Half of the last kept bit, less one where that bit is 0, so that a tie rounds to an even pattern.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
