r"""Integers of 2 to 8 bits with shared scales: formats, and packing into bytes.

Numbers along one axis in groups share a scale. The grid of 8 bits is symmetric, value = scale * q with q from -127 to
127, so that 0 is exact. With few bits a level for 0 is a large part of all levels; the grid of fewer bits is mid-rise,

    value  =  scale * (code - (2^bits - 1) / 2),    code from 0 to 2^bits - 1,

symmetric without a zero point, and all levels are used. The scales of 8 bits are float32, those of fewer bits bfloat16:
in groups of 64 they take a quarter of a bit per number.

Inference engines subtract an integer, 2^(bits - 1), from the code (`has_zero`): 0 is exact, and one side has a level
more than the other, which a scale of either sign puts on the side that needs it. On the built-in Llama this grid costs
14 % more divergence than the mid-rise one at 2 bits, 3 % at 3 and 7 % at 4. All its scales are bfloat16, or integers in
super-blocks, as K-quants of llama.cpp store them: a group g of 16 or 32 numbers has the scale d k_g with an integer k_g
of 4 to 8 bits and a float16 d, which the groups of 256 numbers share. Formats without a zero point in the middle of
their codes also have a minimum,

    value  =  d k_g code - e m_g,        0 <= k_g, m_g < 2^n_bits,

and those with one have scales of either sign, |k_g| < 2^(n_bits - 1). The products d k_g are exact in float32.

Codes of fewer than 8 bits are packed into bytes. The axis of the groups is moved last and padded with zeros to a
multiple of 8 codes; code k occupies the bits [bits k, bits (k + 1)) of a little-endian bit stream, so that 8 codes take
`bits` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.files.safetensors_file import from_bf16, to_bf16

BITS = (2, 3, 4, 5, 6, 8)
FORMAT_FIELDS = ("bits", "axis", "group")  # of a format in config.json
GROUP = 64  # numbers that share a scale, unless another number is given
SUPER_BLOCK = 256  # numbers whose scales are integers in one unit

Shape = Sequence[int]

_FIRST = ("right", "core1")  # parts in int8 with slices along the first axis
_LARGEST = ("core", "stack")  # parts in int8 with slices along the largest axis; of all others it is the last


@dataclass(frozen=True)
class IntegerFormat:
    """Bits of a number, and the numbers that share a scale.

    >>> IntegerFormat(4, axis=0, group=64).scale_shape((200, 3))
    (4, 3)
    """

    bits: int  # one of `BITS`
    axis: int | tuple[int, ...]  # along which consecutive numbers share a scale; for 8 bits also several axes
    group: int = 0  # numbers per scale, the last group may be shorter; 0, or at least the length of the axis, for all
    has_zero: bool = False  # True for the grid of inference engines, which has a level for 0
    # 4 to 8 for scales that are integers in super-blocks of 256 numbers, whose groups divide the axis, 16 for float16,
    # 0 for bfloat16 or float32
    scale_bits: int = 0
    has_minimum: bool = False  # True if a group has a minimum besides its scale, of as many bits: all scales come first

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ArgumentError(
                f"IntegerFormat: bits must be one of {', '.join(map(str, BITS))}, got {self.bits!r}; choose one."
            )
        if self.group < 0 or min(self.axes, default=-1) < 0:
            raise ArgumentError(
                f"IntegerFormat: axis and group must not be negative, got {self.axis!r} and {self.group!r}; count the "
                "axis from the first."
            )
        if isinstance(self.axis, tuple) and (self.bits < 8 or self.group):
            raise ArgumentError(
                f"IntegerFormat: axis must be one number for {self.bits} bits in groups of {self.group}, got "
                f"{self.axis!r}; several axes share one scale in 8 bits only."
            )

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which numbers share scales."""
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def is_packed(self) -> bool:
        """True if several numbers are packed into bytes."""
        return self.bits < 8

    @property
    def centre(self) -> float:
        """The code of 0, between two codes if they are packed; that of the minimum if there is one."""
        if not self.is_packed or self.has_minimum:
            return 0.0
        return 2.0 ** (self.bits - 1) if self.has_zero else (2**self.bits - 1) / 2

    @property
    def has_short_scales(self) -> bool:
        """True if scales are bfloat16, False for float32."""
        return (self.is_packed or self.has_zero) and not self.scale_bits

    @property
    def in_super_blocks(self) -> bool:
        """True if scales are integers in super-blocks."""
        return 0 < self.scale_bits < 16

    @property
    def code_range(self) -> tuple[int, int]:
        """The lowest and the highest code."""
        return (0, 2**self.bits - 1) if self.is_packed else (-127, 127)

    def n_groups(self, length: int) -> int:
        """Return the number of groups of an axis of this length."""
        return -(-length // self.group) if 0 < self.group < length else 1

    def group_sizes(self, length: int) -> list[int]:
        """Return the sizes of all groups of an axis of this length."""
        if not 0 < self.group < length:
            return [length]
        n_full, rest = divmod(length, self.group)
        return [self.group] * n_full + [rest] * (rest > 0)

    def scale_shape(self, shape: Shape) -> tuple[int, ...]:
        """Return the shape of the scales, and minima, of an array of this shape."""
        of_group = 1 + self.has_minimum
        return tuple(of_group * self.n_groups(n) if axis in self.axes else n for axis, n in enumerate(shape))

    def widened(self, scales: Array, factor: float) -> Array:
        """Return the scales of ranges that are wider by a factor about their middle."""
        (axis,), scale = self.axes, np.float32(factor)
        if not self.has_minimum:
            return scales * scale
        scales, minima = np.split(scales, 2, axis)
        return np.concatenate([scale * scales, minima + (scale - 1) / 2 * self.code_range[1] * scales], axis)

    def stored_scales(self, scales: Array) -> Array:
        """Return float32 scales of an array as they are stored, see `scale_shape`."""
        if self.scale_bits == 16:
            with np.errstate(over="ignore"):  # refused by name when they are written
                return scales.astype(np.float16).astype(np.float32)
        if not self.scale_bits:
            return from_bf16(to_bf16(scales)) if self.has_short_scales else scales
        (axis,) = self.axes
        rows = np.moveaxis(scales, axis, -1)
        blocks = np.ascontiguousarray(rows).reshape(-1, SUPER_BLOCK // self.group)
        unit, integers = integer_scales(blocks, self.scale_bits, signed=not self.has_minimum)
        return np.moveaxis((unit * integers).reshape(rows.shape), -1, axis)

    def stored_shape(self, shape: Shape) -> tuple[int, ...]:
        """Return the shape of the codes of an array of this shape as stored."""
        if not self.is_packed:
            return tuple(shape)
        (axis,) = self.axes
        return (*shape[:axis], *shape[axis + 1 :], -(-shape[axis] // 8) * self.bits)

    def n_bits(self, shape: Shape) -> int:
        """Return the number of bits that an array of this shape takes, with padding and scales."""
        scale, n_scales = 16 if self.has_short_scales else self.scale_bits or 32, math.prod(self.scale_shape(shape))
        units = 16 * n_scales * self.group // SUPER_BLOCK if self.in_super_blocks else 0
        return 8 * math.prod(self.stored_shape(shape)) + scale * n_scales + units


@dataclass(frozen=True)
class Integers:
    """Rounded array.

    >>> codes, scales = np.array([0, 3], np.uint8), np.array([2.0], np.float32)
    >>> Integers(codes, scales, IntegerFormat(2, axis=0)).values()
    array([-3.,  3.], dtype=float32)
    """

    codes: Array  # uint8, or int8 for 8 bits, of the shape of the array
    scales: Array  # float32, as many along the axis as groups, of values that `format.stored_scales` keeps
    format: IntegerFormat

    def __post_init__(self) -> None:
        dtype = np.uint8 if self.format.is_packed else np.int8
        shape = self.format.scale_shape(self.codes.shape)
        if self.codes.dtype != dtype or self.scales.shape != shape or max(self.format.axes) >= self.codes.ndim:
            raise ArgumentError(
                f"Integers: codes must be {np.dtype(dtype)} with scales of shape {shape} for {self.format}, got codes "
                f"of {self.codes.dtype} and shape {self.codes.shape}, scales of shape {self.scales.shape}; round the "
                "array in this format."
            )

    @classmethod
    def from_stored(cls, stored: Array, scales: Array, format: IntegerFormat, shape: Shape) -> Integers:
        """Return an array of this shape from its codes and scales as stored: packed bytes, or int8.

        >>> form = IntegerFormat(4, axis=0)
        >>> stored = pack(np.array([1, 2, 15], np.uint8), 4, axis=0)
        >>> Integers.from_stored(stored, np.array([2.0]), form, (3,)).values().tolist()
        [-13.0, -11.0, 15.0]
        """
        codes = stored
        if format.is_packed:
            (axis,) = format.axes
            codes = unpack(stored, format.bits, axis, shape[axis])
        return cls(codes, scales.astype(np.float32), format)

    def stored(self) -> Array:
        """Return the codes as stored, packed if they have fewer bits than 8."""
        return pack(self.codes, self.format.bits, self.format.axes[0]) if self.format.is_packed else self.codes

    def unsigned(self) -> Array:
        """Return the codes from 0 on, uint8: those of 8 bits plus 128."""
        return self.codes if self.format.is_packed else (self.codes.astype(np.int16) + 128).astype(np.uint8)

    def transposed(self) -> Integers:
        """Return the transpose of a matrix with groups along one axis."""
        return Integers(self.codes.T, self.scales.T, replace(self.format, axis=1 - self.format.axes[0]))

    def values(self, dtype: Any = np.float32) -> Array:
        """Return the values of the codes, exactly."""
        form, axis = self.format, self.format.axes[0]
        values = self.codes.astype(dtype)
        values -= form.centre
        scales, *minima = np.split(self.scales.astype(dtype), 1 + form.has_minimum, axis)
        if len(form.axes) == 1:
            sizes = form.group_sizes(values.shape[axis])
            scales, *minima = (np.repeat(part, sizes, axis) for part in (scales, *minima))
        values *= scales
        for minimum in minima:
            values -= minimum
        return values


def int8_format(part: str, shape: Shape) -> IntegerFormat:
    """Return the format of a part in int8: one scale per slice.

    A slice belongs to one component of a product, or to one output of a dense weight, so that its scale absorbs the
    norm of the component in any gauge: a column of `left` (m, r), a row of `right` (r, n), a column of `weight`
    (in, out). The core of a Tucker has slices along its largest axis.
    """
    slices = int(np.argmax(shape)) if part in _LARGEST else 0 if part in _FIRST else len(shape) - 1
    axes = tuple(axis for axis in range(len(shape)) if axis != slices)
    return IntegerFormat(8, axes[0] if len(axes) == 1 else axes)


def part_format(part: str, shape: Shape, bits: int) -> IntegerFormat:
    """Return the format of a part of a product: `int8_format` for 8 bits, otherwise groups along one axis.

    The axis is the one that a product with rows contracts: the first of `left`, `right` and `weight`. Cores of a
    TT-matrix have groups along the longer of their legs, input or output, and parts of a Tucker or CP and stacks along
    their longest axis, because short groups spend bits on scales.
    """
    if bits == 8:
        return int8_format(part, shape)
    if part in _LARGEST or part.startswith("factor"):
        return IntegerFormat(bits, int(np.argmax(shape)), GROUP)
    return IntegerFormat(bits, 1 + int(np.argmax(shape[1:3])) if part.startswith("core") else 0, GROUP)


def integer_scales(scales: Array, n_bits: int, *, signed: bool) -> tuple[Array, Array]:
    """Return units (n, 1) and integers (n, k), in float32, whose products are nearest to the scales (n, k) of n blocks.

    The unit has the least squared error among the largest scale divided by every integer, so that products of a unit
    and integers return as they are.

    >>> scales = np.array([[0.5, 1.5, 7.5]], np.float32)
    >>> unit, integers = integer_scales(scales, 4, signed=False)
    >>> unit.tolist(), integers.tolist()
    ([[0.5]], [[1.0, 3.0, 15.0]])
    """
    limit = 2 ** (n_bits - signed) - 1
    top = np.abs(scales).max(axis=1, keepdims=True)
    least = np.full(len(scales), np.inf, np.float32)
    units, integers = np.zeros_like(top), np.zeros_like(scales)
    for k in range(limit, 0, -1):
        unit = (top / np.float32(k)).astype(np.float16).astype(np.float32)
        rounded = np.clip(np.rint(scales / np.where(unit == 0, np.float32(1), unit)), -limit * signed, limit)
        error = np.square(scales - unit * rounded).sum(axis=1)
        better = error < least
        units[better], integers[better], least[better] = unit[better], rounded[better], error[better]
    return units, integers


def pack(codes: Array, bits: int, axis: int) -> Array:
    """Return uint8 codes below 2^bits packed along an axis, which becomes the last one: `bits` bytes for 8 codes.

    The other axes keep their order. Raises `ArgumentError` if a code does not fit.

    >>> pack(np.array([1, 2, 3], np.uint8), 4, axis=0).tolist()  # padded to 8 numbers
    [33, 3, 0, 0]
    """
    if codes.size and codes.max() >= 2**bits:
        raise ArgumentError(f"pack: codes must be below {2**bits} for {bits} bits, got {codes.max()}; clip them.")
    rows = np.moveaxis(codes, axis, -1)
    n, others = rows.shape[-1], rows.shape[:-1]
    padded = np.zeros((*others, -(-n // 8) * 8), np.uint8)
    padded[..., :n] = rows
    n_codes, n_bytes = period(bits)
    blocks = padded.reshape(-1, n_codes)
    packed = np.zeros((len(blocks), n_bytes), np.uint8)
    for k in range(n_codes):
        byte, shift = divmod(bits * k, 8)
        packed[:, byte] |= blocks[:, k] << shift  # bits above the eighth are lost here
        if shift + bits > 8:
            packed[:, byte + 1] |= blocks[:, k] >> (8 - shift)
    return packed.reshape(*others, padded.shape[-1] // 8 * bits)


def unpack(packed: Array, bits: int, axis: int, length: int) -> Array:
    """Return the codes from packed bytes (other axes, bytes), the inverse of `pack`; those of the padding are dropped.

    >>> unpack(np.array([33, 3, 0, 0], np.uint8), 4, axis=0, length=3).tolist()
    [1, 2, 3]
    """
    n_codes, n_bytes = period(bits)
    blocks = packed.reshape(-1, n_bytes)
    codes = np.empty((len(blocks), n_codes), np.uint8)
    for k, code in enumerate(codes_in(blocks, bits)):
        codes[:, k] = code
    rows = codes.reshape(*packed.shape[:-1], packed.shape[-1] // bits * 8)
    return np.moveaxis(rows[..., :length], -1, axis)


def codes_in(blocks: Any, bits: int) -> Iterator[Any]:
    """Yield the codes (...) of whole bytes (..., bytes) one after the other, of an array or a tensor of torch."""
    for k in range(period(bits)[0]):
        byte, shift = divmod(bits * k, 8)
        code = blocks[..., byte] >> shift
        if shift + bits > 8:
            code |= blocks[..., byte + 1] << (8 - shift)
        code &= 2**bits - 1
        yield code


def period(bits: int) -> tuple[int, int]:
    """Return the smallest number of codes that fill whole bytes, and these bytes.

    >>> [period(bits) for bits in (2, 3, 4, 6)]
    [(4, 1), (8, 3), (2, 1), (4, 3)]
    """
    common = math.gcd(8, bits)
    return 8 // common, bits // common
