"""Tensors in integers: their values, and products with few vectors by compiled kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tnlib_adapters.factors.integers import IntegerFormat, period

_FEWEST = 2**14  # bytes of codes for which a kernel is worth the time of compiling it
_MOST_VECTORS = 8  # more are faster by BLAS, dequantization included
_SHORT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes for which sums in float32 are exact enough


def dequantized(
    codes: Tensor, scales: Tensor, form: IntegerFormat, axis: int, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the values of stored codes, whose groups lie along an axis of the result of this length.

    Packed codes are (other axes, bytes), others of the shape of the array; scales have as many entries along the axis
    as groups. On the CPU packed codes of some size are unpacked by a kernel, at a tenth of the time.
    """
    if form.n_groups(length) == 1 and not form.is_packed:
        return codes.to(dtype) * scales.to(dtype)
    has_gradient = scales.requires_grad and torch.is_grad_enabled()
    if form.is_packed and dtype in _SHORT and not has_gradient and _by_kernel(codes, scales):
        from tnlib_adapters.factors.integer_product import row_values  # loads numba

        of_rows = scales.detach().float().movedim(axis, 0).reshape(form.n_groups(length), -1)
        rows = codes.reshape(-1, codes.shape[-1]).contiguous()
        by_row = torch.from_numpy(row_values(rows.numpy(), of_rows.numpy(), form, length))
        return by_row.reshape(*codes.shape[:-1], length).movedim(-1, axis).to(dtype)
    rows = _unpacked(codes, form.bits)[..., :length] if form.is_packed else codes.movedim(axis, -1)
    values, of_rows = rows.to(dtype) - form.centre, scales.to(dtype).movedim(axis, -1)
    if form.n_groups(length) > 1:
        of_rows = of_rows.repeat_interleave(form.group, -1)[..., :length]
    return (values * of_rows).movedim(-1, axis)


def multiply_few(x: Tensor, codes: Tensor, scales: Tensor, form: IntegerFormat, *, transposed: bool) -> Tensor | None:
    """Return x W, or x W^T if `transposed`, for a matrix W of stored codes; None where there is no kernel for it.

    Kernels take up to 8 vectors on the CPU, where gradients are disabled. Groups of packed codes must lie along the
    axis that is summed over; int8 has one scale per row or per column.
    """
    n_in = x.shape[-1]
    is_few = 0 < x.numel() <= _MOST_VECTORS * n_in and x.dtype in _SHORT
    if not is_few or torch.is_grad_enabled() or len(form.axes) > 1 or not _by_kernel(codes, scales):
        return None
    from tnlib_adapters.factors.integer_product import times_columns, times_rows  # loads numba

    along_rows = form.axes[0] == 1
    rows, stored, by_group = x.float().numpy().reshape(-1, n_in), codes.numpy(), scales.detach().float().numpy()
    if form.is_packed and along_rows == transposed:
        y = times_rows(rows, stored, by_group.T if transposed else by_group, form)
    elif not form.is_packed and (along_rows or len(by_group) == 1):
        ones = np.ones((1, len(stored)), np.float32)
        of_rows, of_columns = (by_group.T, ones[:, :1]) if along_rows else (ones, by_group)
        if transposed:
            y = times_rows(rows * of_columns, stored, of_rows, form)
        else:
            y = times_columns(rows, stored, of_rows, form, stored.shape[1]) * of_columns
    else:
        return None
    return torch.from_numpy(y.reshape(*x.shape[:-1], y.shape[1])).to(x.dtype)


def _by_kernel(codes: Tensor, scales: Tensor) -> bool:
    """Test if a kernel of numba may read these tensors, and is worth compiling."""
    return codes.is_cpu and scales.is_cpu and codes.numel() >= _FEWEST and not torch.compiler.is_compiling()


def _unpacked(packed: Tensor, bits: int) -> Tensor:
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
