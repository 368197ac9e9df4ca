"""Tensors in integers: their values, and products with few vectors by compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tnlib._typing import Array
from tnlib_adapters.factors.integers import IntegerFormat, codes_in, period

_Product: TypeAlias = Callable[[Array], Array]

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
        from tnlib_adapters.factors.integer_product import IntegerMatrix  # loads numba

        of_rows = scales.detach().float().movedim(axis, 0).reshape(form.n_groups(length), -1)
        rows = codes.reshape(-1, codes.shape[-1]).contiguous()
        by_row = torch.from_numpy(IntegerMatrix(rows.numpy(), of_rows.numpy(), form, length).values())
        return by_row.reshape(*codes.shape[:-1], length).movedim(-1, axis).to(dtype)
    rows = _unpacked(codes, form.bits)[..., :length] if form.is_packed else codes.movedim(axis, -1)
    values, of_rows = rows.to(dtype) - form.centre, scales.to(dtype).movedim(axis, -1)
    if form.n_groups(length) > 1:
        of_rows = of_rows.repeat_interleave(form.group, -1)[..., :length]
    return (values * of_rows).movedim(-1, axis)


class FewVectorProducts:
    """Products of few vectors with the parts of a layer in integers, prepared at the first call. Copies are empty."""

    def __init__(self) -> None:
        # by part, with the addresses of its codes and scales
        self._prepared = dict[str, tuple[tuple[int, int], _Product | None]]()

    def __reduce__(self) -> tuple[Any, ...]:
        return FewVectorProducts, ()

    def clear(self) -> None:
        """Drop what refers to tensors."""
        self._prepared.clear()

    def multiply(
        self, name: str, x: Tensor, codes: Tensor, scales: Tensor, form: IntegerFormat, *, transposed: bool
    ) -> Tensor | None:
        """Return x W, or x W^T if `transposed`, for the part W of these codes; None where there is no kernel for it.

        Kernels take up to 8 vectors on the CPU, where gradients are disabled. Groups of packed codes must lie along the
        axis that is summed over; int8 has one scale per row or per column.
        """
        n_in = x.shape[-1]
        is_few = 0 < x.numel() <= _MOST_VECTORS * n_in and x.dtype in _SHORT
        if not is_few or torch.is_grad_enabled() or not _by_kernel(codes, scales):
            return None
        addresses = codes.data_ptr(), scales.data_ptr()
        known, product = self._prepared.get(name, (None, None))
        if transposed or known != addresses:
            product = _product(codes, scales, form, n_in, transposed=transposed)
            # other scales are copied, and changes in place would not reach the copy
            if not transposed and scales.dtype == torch.float32 and scales.is_contiguous():
                self._prepared[name] = addresses, product
        if product is None:
            return None
        y = product(x.float().numpy().reshape(-1, n_in))
        return torch.from_numpy(y.reshape(*x.shape[:-1], y.shape[1])).to(x.dtype)


def _product(codes: Tensor, scales: Tensor, form: IntegerFormat, n_in: int, *, transposed: bool) -> _Product | None:
    """Return the product of float32 vectors with W, or W^T; None where no kernel takes the format."""
    along_rows = form.axes[0] == 1
    has_kernel = along_rows == transposed if form.is_packed else along_rows or len(scales) == 1
    if len(form.axes) > 1 or not has_kernel:
        return None
    from tnlib_adapters.factors.integer_product import IntegerMatrix  # loads numba

    stored, by_group = codes.numpy(), scales.detach().float().numpy()
    if form.is_packed:
        return IntegerMatrix(stored, by_group.T if transposed else by_group, form, n_in).times_rows
    ones = np.ones((1, len(stored)), np.float32)
    of_rows, of_columns = (by_group.T, ones[:, :1]) if along_rows else (ones, by_group)
    matrix = IntegerMatrix(stored, of_rows, form, stored.shape[1])
    if transposed:
        return lambda x: matrix.times_rows(x * of_columns)
    return lambda x: matrix.times_columns(x) * of_columns


def _by_kernel(codes: Tensor, scales: Tensor) -> bool:
    """Test if a kernel of numba may read these tensors, and is worth compiling."""
    return codes.is_cpu and scales.is_cpu and codes.numel() >= _FEWEST and not torch.compiler.is_compiling()


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of packed bytes, (..., 8 n) from (..., bits n)."""
    _, n_bytes = period(bits)
    blocks = packed.reshape(*packed.shape[:-1], packed.shape[-1] // n_bytes, n_bytes)
    return torch.stack([*codes_in(blocks, bits)], -1).flatten(-2)
