"""Products with factors in integers by torch's kernels for packed weights, in bfloat16 on the CPU.

The kernels dequantize in registers. One row of a 2048 x 2048 matrix takes 0.31 (int8) and 0.38 (int4) of the time of
the product in bfloat16, because fewer bytes are read; 8 rows take the same time, more take longer. Up to 16 rows take
at most half of the time of dequantization and product. In float32 the same operations have no vectorised code: they
take 7 to 80 times as long as the product.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnlib import ArgumentError
from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.transformers_plugin.dequantize import unpacked
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear

_MOST_ROWS = 16
_GROUP, _OUT = 64, 16  # multiples of the sizes that the kernels take


class PackedProduct(nn.Module):
    """x -> x W, for integers W (in, out) of 8 bits with one scale per column, or of 2 to 4 bits with groups of rows.

    Codes c of fewer than 4 bits are those of 4 bits, c + 8 - 2^(bits - 1): a value is (code - 8 + 1/2) scale.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, form: IntegerFormat) -> None:
        super().__init__()
        self.n_in, self.n_out = codes.shape
        self.is_int8 = not form.is_packed
        pad_in, pad_out = -self.n_in % _GROUP, -self.n_out % _OUT
        weight = functional.pad(codes.T, (0, pad_in, 0, pad_out)).contiguous()  # out in
        by_column = functional.pad(scales.detach().to(torch.bfloat16), (0, pad_out))
        if self.is_int8:
            kept, of_kernel = weight, by_column[0]
        else:
            n_groups = weight.shape[1] // _GROUP
            kept = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.int() + 8 - 2 ** (form.bits - 1), 1)
            rows = by_column.expand(n_groups, -1) if len(by_column) == 1 else by_column
            of_kernel = torch.stack([rows, rows / 2], -1).contiguous()
        self.register_buffer("codes", kept, persistent=False)
        self.register_buffer("scales", of_kernel, persistent=False)

    @staticmethod
    def holds(shape: tuple[int, ...], form: IntegerFormat) -> bool:
        """Test if there is a kernel for an array in this format."""
        if len(shape) != 2 or form.axes != (0,):
            return False
        return form.n_groups(shape[0]) == 1 or (form.bits <= 4 and form.group == _GROUP)

    def takes(self, x: Tensor) -> bool:
        """Test if the kernel is the faster way for this input; it has no derivatives."""
        is_small = x.dtype == self.scales.dtype == torch.bfloat16 and x[..., 0].numel() <= _MOST_ROWS
        return is_small and x.device == self.codes.device and not torch.is_grad_enabled()

    def forward(self, x: Tensor) -> Tensor:
        """Return x W."""
        rows = functional.pad(x.reshape(-1, self.n_in), (0, -self.n_in % _GROUP)).contiguous()
        y: Tensor
        if self.is_int8:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scales)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, _GROUP, self.scales)
        return y[:, : self.n_out].reshape(*x.shape[:-1], self.n_out)


def use_packed_kernels(model: nn.Module) -> nn.Module:
    """Multiply few rows by factors in integers with torch's packed kernels, and return the model.

    For generation: a token is faster than with integers that are dequantized in every call, and than in bfloat16. The
    kernels need a copy of the integers in an order of their own, which is not saved and does not follow a change of the
    scales. Factors that no kernel takes are dequantized as before: those of 5 to 7 bits, TT-matrices, Tucker, CP and
    heads.

    Parameters
    ----------
    model
        Model in bfloat16 on the CPU, loaded by `from_pretrained`, with factors in int8, int4, int3 or int2.

    Raises
    ------
    ArgumentError
        If the model is in another dtype or on another device, or no kernel takes any of its factors.
    """
    first = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    if first.dtype != torch.bfloat16 or first.device.type != "cpu":
        raise ArgumentError(
            f"use_packed_kernels: model must be in torch.bfloat16 on the CPU, got {first.dtype} on {first.device}; "
            "load it with dtype=torch.bfloat16, or use use_linear_layers."
        )
    layers = [module for module in model.modules() if isinstance(module, FactoredLinear)]
    if sum([_add_kernels(layer) for layer in layers]) == 0:
        raise ArgumentError(
            "use_packed_kernels: model must have weights or low-rank factors in integers of 8, or of 2 to 4 bits, got "
            "none; use use_linear_layers."
        )
    return model


def _add_kernels(layer: FactoredLinear) -> int:
    """Give the kernels of a layer's parts to the module of its parameters, and return their number."""
    parts = {name: own for name, own in layer.multiplied_integers().items() if PackedProduct.holds(*own)}
    for name, (shape, form) in parts.items():
        codes, scales = layer.held(name)
        if form.is_packed:
            codes = unpacked(codes, form.bits)[..., : shape[0]].T  # out in -> in out
        layer.add_kernel(name, PackedProduct(codes.detach(), cast(Tensor, scales), form))
    return len(parts)
