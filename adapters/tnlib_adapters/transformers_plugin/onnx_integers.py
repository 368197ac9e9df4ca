"""Integer weights in an ONNX graph: the operators MatMulNBits and GatherBlockQuantized of onnxruntime.

Weights that a folder stores as integers (`factors.engine_tensors`) keep their codes and scales in the graph; the table
of token embeddings is rounded to 8 bits. onnxruntime rounds activations to 8 bits too (`accuracy_level` 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.factors.engine_tensors import IntegerTensor
from tnlib_adapters.factors.integers import IntegerFormat, round_to_nearest
from tnlib_adapters.factors.packing import pack
from tnlib_adapters.transformers_plugin.quantizer import find_place

_BITS = (2, 4, 8)
_BLOCKS = (128, 64, 32, 16)
_TABLE_BITS = 8
_ACTIVATIONS_IN_8_BITS = 4  # accuracy_level; float activations take three times as long


class IntegerLinear(nn.Module):
    """A linear layer with packed codes, to be exported: torch has no operator for it."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Array, scales: Array, bits: int, bias: Tensor | None) -> None:
        super().__init__()
        n_out, n_blocks = scales.shape
        packed = codes if bits == 8 else pack(codes, bits, 1)
        self.register_buffer("codes", torch.from_numpy(packed.reshape(n_out, n_blocks, -1).copy()))
        self.register_buffer("scales", torch.from_numpy(scales.copy()))
        self.bits, self.block, self.bias = bits, codes.shape[1] // n_blocks, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ W^T + bias."""
        n_out, n_blocks = self.scales.shape
        product = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (x, self.codes, self.scales),
            {
                "K": n_blocks * self.block,
                "N": n_out,
                "bits": self.bits,
                "block_size": self.block,
                "accuracy_level": _ACTIVATIONS_IN_8_BITS,
            },
            dtype=x.dtype,
            shape=(*x.shape[:-1], n_out),
            version=1,
        )
        return product if self.bias is None else product + self.bias


class IntegerTable(nn.Module):
    """A table of embeddings in 8 bits, to be exported; its width is that of integer weights, a multiple of a block."""

    codes: Tensor
    scales: Tensor

    def __init__(self, table: Array) -> None:
        super().__init__()
        self.block = next(block for block in _BLOCKS if table.shape[1] % block == 0)
        rounded = round_to_nearest(table, IntegerFormat(_TABLE_BITS, 1, self.block, has_zero=True))
        codes = (rounded.codes.astype(np.int16) + 2 ** (_TABLE_BITS - 1)).astype(np.uint8)
        self.register_buffer("codes", torch.from_numpy(codes))
        self.register_buffer("scales", torch.from_numpy(rounded.scales))

    def forward(self, indices: Tensor) -> Tensor:
        """Return the rows of these indices."""
        return torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (self.codes, indices, self.scales),
            {"bits": _TABLE_BITS, "block_size": self.block, "gather_axis": 0, "quantize_axis": 1},
            dtype=self.scales.dtype,
            shape=(*indices.shape, self.codes.shape[1]),
            version=1,
        )


def integer_weights(checkpoint: Checkpoint) -> dict[str, IntegerTensor]:
    """Return the weights that a folder stores as integers of an engine, by tensor name."""
    return {name: info for name, info in checkpoint.folder.tensors.items() if isinstance(info, IntegerTensor)}


def check_weights(weights: Mapping[str, IntegerTensor]) -> None:
    """Raise if onnxruntime has no operator for a width, a group or a zero of these weights."""
    advice = "compress with layout 'onnxruntime' (--layout onnxruntime)."
    for name, info in weights.items():
        (_, n_in), n_groups, zero = info.shape, info.n_groups, 2 ** (info.n_bits - 1)
        block = n_in // n_groups
        if info.n_bits not in _BITS or block not in _BLOCKS or block * n_groups != n_in:
            raise ArgumentError(
                f"export_onnx: weights in integers must have {', '.join(map(str, _BITS))} bits in groups of "
                f"{', '.join(map(str, _BLOCKS))} inputs for onnxruntime, got {name!r} of {info.n_bits} bits in groups "
                f"of {block}; {advice}"
            )
        if (info.groups() != np.arange(n_in) // block).any():
            raise ArgumentError(
                f"export_onnx: the groups of {name!r} must be of {block} consecutive inputs for onnxruntime, got "
                f"another order (desc_act); {advice}"
            )
        if (info.zeros() != zero).any():
            raise ArgumentError(f"export_onnx: the code of 0 must be {zero} in {name!r}, got others; {advice}")


def use_integers(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Replace the linear layers of integer weights, and the table of token embeddings, of a model in memory.

    The weights are those that `check_weights` admits.
    """
    for name, info in integer_weights(checkpoint).items():
        place, linear = find_place(model, name.removesuffix(".weight").removeprefix(checkpoint.prefix))
        bias: Any = linear.bias
        _set(model, place, IntegerLinear(info.codes().astype(np.uint8), info.scales(), info.n_bits, bias))
    if checkpoint.wiring.reads == "tokens":
        table = checkpoint.wiring.embedding.table
        place, _ = find_place(model, table.module.removeprefix(checkpoint.prefix))
        _set(model, place, IntegerTable(checkpoint.folder.tensors[table.weight].read_finite()))
    return model


def _set(model: nn.Module, place: str, module: nn.Module) -> None:
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
