"""Weights in the block types of GGUF: formats of their integers, and bytes.

A row of a matrix (out, in) is a row of blocks, of 32 inputs with a float16 scale, or of 256 whose scales, and minima,
are integers (`integers`). A block consists of fields. A plane holds some bits of every code: consecutive chunks of
8 / n_bits rows of `n_lanes` codes, of which one byte holds a column, the first row in its lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib_adapters.factors.integers import SUPER_BLOCK, IntegerFormat, Integers, integer_scales
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.safetensors_file import ComputedTensor, TensorInfo

GGUF = "gguf"
_PART = "weight_blocks"


class Plane(NamedTuple):
    """Bits of codes from `first` on."""

    first: int
    n_bits: int
    n_lanes: int

    def pack(self, codes: Array) -> Array:
        """Return the bytes (n, bytes) of codes (n, size).

        >>> Plane(0, 4, 2).pack(np.array([[1, 2, 3, 4]])).tolist()
        [[49, 66]]
        """
        values = (codes.astype(np.uint8) >> self.first) & (2**self.n_bits - 1)
        per_byte = 8 // self.n_bits
        rows = values.reshape(len(codes), -1, per_byte, self.n_lanes) << (
            self.n_bits * np.arange(per_byte, dtype=np.uint8)[:, None]
        )
        packed: Array = np.bitwise_or.reduce(rows, axis=2, dtype=np.uint8)
        return packed.reshape(len(codes), -1)


def _six_bits_with_minima(scales: Array, minima: Array) -> Array:
    """Return 12 bytes of 8 scales and 8 minima: the upper bits of the last four of each fill bytes of the first."""
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    return np.hstack([*first, (scales[:, 4:] & 15) | minima[:, 4:] << 4])


# fields besides codes: float16 units of scales and of minima, and their integers
_D, _E, _SCALES = "d", "e", "scales"
_PACK_SCALES: Mapping[tuple[int, int], Callable[..., Array]] = {  # by bits and arrays
    (4, 2): lambda scales, minima: scales | minima << 4,
    (6, 1): lambda scales: np.hstack([Plane(0, 4, 8).pack(scales + 32), Plane(4, 2, 4).pack(scales + 32)]),
    (6, 2): _six_bits_with_minima,
    (8, 1): lambda scales: scales,
}


@dataclass(frozen=True)
class BlockType:
    """Format of the integers of a weight (in, out), and fields of a block."""

    form: IntegerFormat
    fields: tuple[str | Plane, ...]

    @property
    def size(self) -> int:
        """Numbers in a block."""
        return SUPER_BLOCK if self.form.in_super_blocks else self.form.group


TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(IntegerFormat(4, 0, 32, has_zero=True, scale_bits=16), (_D, Plane(0, 4, 16))),
    "Q5_0": BlockType(IntegerFormat(5, 0, 32, has_zero=True, scale_bits=16), (_D, Plane(4, 1, 1), Plane(0, 4, 16))),
    "Q8_0": BlockType(IntegerFormat(8, 0, 32, has_zero=True, scale_bits=16), (_D, Plane(0, 8, 32))),
    "Q2_K": BlockType(IntegerFormat(2, 0, 16, scale_bits=4, has_minimum=True), (_SCALES, Plane(0, 2, 32), _D, _E)),
    "Q3_K": BlockType(
        IntegerFormat(3, 0, 16, has_zero=True, scale_bits=6), (Plane(2, 1, 32), Plane(0, 2, 32), _SCALES, _D)
    ),
    "Q4_K": BlockType(IntegerFormat(4, 0, 32, scale_bits=6, has_minimum=True), (_D, _E, _SCALES, Plane(0, 4, 32))),
    "Q5_K": BlockType(
        IntegerFormat(5, 0, 32, scale_bits=6, has_minimum=True),
        (_D, _E, _SCALES, Plane(4, 1, 32), Plane(0, 4, 32)),
    ),
    "Q6_K": BlockType(
        IntegerFormat(6, 0, 16, has_zero=True, scale_bits=8), (Plane(0, 4, 64), Plane(4, 2, 32), _SCALES, _D)
    ),
}


def block_formats(length: int, widths: Sequence[int]) -> list[IntegerFormat]:
    """Return the formats of columns of this length in these widths: one a width, in super-blocks if they divide it.

    >>> [form.scale_bits for form in block_formats(512, (4, 8))]
    [6, 16]
    """
    fitting = {own.form.bits: own.form for own in TYPES.values() if length % own.size == 0 and own.form.bits in widths}
    return list(fitting.values())


def type_of(form: IntegerFormat) -> str:
    """Return the type of a format; integers of one are those of a weight (in, out)."""
    return next(name for name, own in TYPES.items() if own.form == replace(form, axis=0))


def encode_blocks(integers: Integers) -> dict[str, tuple[str, Array]]:
    """Return {name below the module: (dtype, array)} of a weight (in, out): the bytes (out, bytes) of its rows.

    >>> codes, scales = np.full((32, 1), 72, np.int8), np.ones((1, 1), np.float32)
    >>> integers = Integers(codes, scales, TYPES["Q8_0"].form)
    >>> encode_blocks(integers)["weight_blocks"][1][:, :4]
    array([[ 0, 60, 72, 72]], dtype=uint8)
    """
    kind, form, n_out = TYPES[type_of(integers.format)], integers.format, integers.codes.shape[1]
    codes = np.ascontiguousarray(integers.codes.T).reshape(-1, kind.size)
    parts = [
        np.ascontiguousarray(part.T).reshape(len(codes), -1) for part in np.split(integers.scales, 1 + form.has_minimum)
    ]
    fields = dict[Any, Array]()
    if form.in_super_blocks:
        scaled = [integer_scales(part, form.scale_bits, signed=not form.has_minimum) for part in parts]
        parts = [unit for unit, _ in scaled]
        stored = [k.astype(np.int8).view(np.uint8) for _, k in scaled]
        fields[_SCALES] = _PACK_SCALES[form.scale_bits, len(stored)](*stored)
    for name, unit in zip((_D, _E), parts, strict=False):
        fields[name] = unit.astype("<f2").view(np.uint8)
    fields |= {field: field.pack(codes) for field in kind.fields if isinstance(field, Plane)}
    return {_PART: ("U8", np.hstack([fields[field] for field in kind.fields]).reshape(n_out, -1))}


def blocks_shape(form: IntegerFormat, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name below the module: (dtype, shape)} of a weight (in, out) as it is encoded.

    >>> blocks_shape(TYPES["Q6_K"].form, (256, 3))
    {'weight_blocks': ('U8', (3, 210))}
    """
    return {_PART: ("U8", (shape[1], replace(form, axis=0).n_bits((shape[0], 1)) // 8))}


def describe_blocks(formats: Mapping[str, IntegerFormat]) -> dict[str, Any]:
    """Return the section of config.json for modules in these formats."""
    return {"quant_method": GGUF, "types": {module: type_of(form) for module, form in formats.items()}}


@dataclass(frozen=True)
class BlockTensor(ComputedTensor):
    """A weight (out, in) in blocks, which reads as float32 through the package gguf."""

    blocks: TensorInfo
    kind: str

    def read_stored(self) -> Array:
        """Return the values of the blocks."""
        gguf = import_optional("open_checkpoint: blocks of GGUF", "gguf", "'tnlib[gguf]'")
        values: Array = gguf.dequantize(self.blocks.read(), gguf.GGMLQuantizationType[self.kind])
        return values


def with_dequantized_blocks(folder: Folder, types: Any) -> dict[str, TensorInfo]:
    """Return the tensors of a folder, in which weights in blocks of these types, by module, read as dense ones."""
    tensors = dict(folder.tensors)
    for module, kind in types.items() if isinstance(types, dict) else ():
        info = tensors.pop(f"{module}.{_PART}", None)
        per_block = TYPES[kind].form.n_bits((TYPES[kind].size, 1)) // 8 if kind in tuple(TYPES) else 0
        if info is None or info.dtype != "U8" or len(info.shape) != 2 or not per_block or info.shape[1] % per_block:
            raise FileFormatError(
                f"open_checkpoint: {module}.{_PART} in {folder.path} must be rows of blocks of one of "
                f"{', '.join(TYPES)}, got {None if info is None else (info.dtype, info.shape)} for {kind!r:.80}; copy "
                "the folder again."
            )
        shape = (info.shape[0], info.shape[1] // per_block * TYPES[kind].size)
        name = f"{module}.weight"
        tensors[name] = BlockTensor(info.file, name, "F32", shape, 0, info.end - info.begin, info, kind)
    return tensors
