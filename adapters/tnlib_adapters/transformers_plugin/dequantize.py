"""Dequantize integers in torch: the values of codes and scales as stored, see `factors.integers`."""

from __future__ import annotations

import torch
from torch import Tensor

from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.factors.packing import period


def dequantized(
    codes: Tensor, scales: Tensor, form: IntegerFormat, axis: int, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the values of stored codes.

    Parameters
    ----------
    codes
        As stored: of the shape of the array, or packed, (other axes, bytes).
    scales
        With as many entries along `axis` as groups.
    form
        Bits and groups.
    axis, length
        Axis of the groups among the axes of the result, and its length.
    dtype
        Of the result.
    """
    if form.n_groups(length) == 1 and not form.is_packed:
        return codes.to(dtype) * scales.to(dtype)
    rows = unpacked(codes, form.bits)[..., :length] if form.is_packed else codes.movedim(axis, -1)
    values, of_rows = rows.to(dtype) - form.centre, scales.to(dtype).movedim(axis, -1)
    if form.n_groups(length) > 1:
        of_rows = of_rows.repeat_interleave(form.group, -1)[..., :length]
    return (values * of_rows).movedim(-1, axis)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of packed bytes, (..., 8 n) from (..., bits n)."""
    n_codes, n_bytes = period(bits)
    blocks = packed.reshape(*packed.shape[:-1], packed.shape[-1] // n_bytes, n_bytes)
    codes = []
    for k in range(n_codes):
        byte, shift = divmod(bits * k, 8)
        code = blocks[..., byte] >> shift
        if shift + bits > 8:
            code = code | (blocks[..., byte + 1] << (8 - shift))
        codes.append(code & (2**bits - 1))
    return torch.stack(codes, -1).flatten(-2)
