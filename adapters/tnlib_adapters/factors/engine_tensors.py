"""Linear layers in the integers that inference engines read: GPTQ and compressed-tensors (pack-quantized).

A weight W (in, out) has codes q, and a scale s and an integer zero z for every group of inputs and every output,

    W_ij = s_gj (q_ij - z_gj),        g = group of input i.

tnlib writes z = 2^(bits - 1) and consecutive groups, `IntegerFormat(bits, axis=0, group, has_zero=True)`. Both formats
are read with any zeros and any order of the inputs, from any writer: such a folder opens as the dense model.

Codes are a little-endian stream of bits in words of 32, along the inputs; zeros likewise, along the outputs. GPTQ is
written in version 1, "gptq", which stores zeros less one; version 2, "gptq_v2", stores the zeros.

    GPTQ                 qweight (in bits / 32, out), qzeros (groups, out bits / 32), scales (groups, out), g_idx (in)
    compressed-tensors   weight_packed (out, in bits / 32), weight_scale (out, groups), weight_shape (2,),
                         weight_zero_point (out bits / 32, groups) unless z = 2^(bits - 1), weight_g_idx (in) if ordered
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.factors.config_section import quantization
from tnlib_adapters.factors.gguf_blocks import (
    GGUF,
    blocks_shape,
    describe_blocks,
    encode_blocks,
    with_dequantized_blocks,
)
from tnlib_adapters.factors.integers import IntegerFormat, Integers, pack, unpack
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.safetensors_file import FLOATS, ComputedTensor, TensorInfo, check_finite, encode

GPTQ, COMPRESSED_TENSORS = "gptq", "compressed-tensors"
_WORD, _SCALE_DTYPE = 32, "BF16"  # bits; dtype of written scales
_NAMES = {  # tensors of a weight, in the order in which they are written
    GPTQ: {"codes": "qweight", "zeros": "qzeros", "scales": "scales", "groups": "g_idx"},
    COMPRESSED_TENSORS: {
        "codes": "weight_packed",
        "scales": "weight_scale",
        "shape": "weight_shape",
        "zeros": "weight_zero_point",
        "groups": "weight_g_idx",
    },
}
_VECTORS = ("groups", "shape")  # all others are matrices
_DTYPES = {"codes": ("I32",), "zeros": ("I32",), "scales": FLOATS} | dict.fromkeys(_VECTORS, ("I32", "I64"))
_UNWRITTEN = ("weight_zero_point", "weight_g_idx")  # tensors that only other writers have
_OPTIONAL = (*_UNWRITTEN, "g_idx")
_VERSIONS = ("gptq", "gptq_v2")  # checkpoint_format


def encode_gptq(integers: Integers) -> dict[str, tuple[str, Array]]:
    """Return {name below the module: (dtype, array)} of a weight (in, out) for GPTQ, version 1.

    Both sides are multiples of 32.
    """
    form, (n_in, n_out) = integers.format, integers.codes.shape
    zeros = np.full((form.n_groups(n_in), n_out), 2 ** (form.bits - 1) - 1, np.uint8)
    group = form.group or n_in
    return {
        "qweight": ("I32", np.ascontiguousarray(_words(integers.unsigned(), form.bits, axis=0).T)),
        "qzeros": ("I32", _words(zeros, form.bits, axis=1)),
        "scales": (_SCALE_DTYPE, encode(integers.scales, _SCALE_DTYPE)),
        "g_idx": ("I32", (np.arange(n_in) // group).astype(np.int32)),
    }


def encode_compressed_tensors(integers: Integers) -> dict[str, tuple[str, Array]]:
    """Return {name below the module: (dtype, array)} of a weight (in, out) for compressed-tensors, pack-quantized."""
    return {
        "weight_packed": ("I32", _words(integers.unsigned(), integers.format.bits, axis=0)),
        "weight_scale": (_SCALE_DTYPE, encode(np.ascontiguousarray(integers.scales.T), _SCALE_DTYPE)),
        "weight_shape": ("I64", np.array(integers.codes.shape[::-1], np.int64)),
    }


def stored_shapes(
    stored_as: str, form: IntegerFormat, shape: tuple[int, ...]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name below the module: (dtype, shape)} of a weight (in, out) as it is encoded.

    >>> form = IntegerFormat(3, 0, 32, has_zero=True)
    >>> stored_shapes(COMPRESSED_TENSORS, form, (64, 32))["weight_packed"]
    ('I32', (32, 6))
    """
    if stored_as == GGUF:
        return blocks_shape(form, shape)
    shapes = _shapes(stored_as, form.bits, form.n_groups(shape[0]), shape)
    dtypes, names = {"scales": _SCALE_DTYPE, "shape": "I64"}, _NAMES[stored_as]
    return {name: (dtypes.get(part, "I32"), shapes[part]) for part, name in names.items() if name not in _UNWRITTEN}


def _shapes(method: str, bits: int, n_groups: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a weight (in, out)."""
    n_in, n_out = shape
    words, of_zeros = (-(-length * bits // _WORD) for length in shape)
    matrices = {"codes": (words, n_out), "zeros": (n_groups, of_zeros), "scales": (n_groups, n_out)}
    if method == COMPRESSED_TENSORS:
        matrices = {part: sides[::-1] for part, sides in matrices.items()}
    return {**matrices, "groups": (n_in,), "shape": (2,)}


ENCODE = {GPTQ: encode_gptq, COMPRESSED_TENSORS: encode_compressed_tensors, GGUF: encode_blocks}


def describe_gptq(formats: Mapping[str, IntegerFormat]) -> dict[str, Any]:
    """Return the section of config.json for modules in these formats: the most frequent, and rules for the others.

    A module matches one rule, whatever their order: its own, if it differs from the first module of its parent, or that
    of its parent, which matches every other name: fused layers of vLLM and SGLang have no other name in the file.
    """
    kinds = [(form.bits, form.group) for form in formats.values()]
    bits, group = max(sorted(set(kinds)), key=kinds.count)  # the most frequent
    of_parents, rules, others = dict[str, IntegerFormat](), dict[str, IntegerFormat](), dict[str, set[str]]()
    for module, form in formats.items():
        parent, dot, name = module.rpartition(".")
        if not dot or form != of_parents.setdefault(parent, form):
            rules[re.escape(module)] = form
            others.setdefault(parent, set()).add(name)
        path = module.split(".")
        for depth in range(1, len(path) - 1):  # names of parents inside of others
            others.setdefault(".".join(path[:depth]), set()).add(path[depth])
    for parent, form in of_parents.items():
        names = "|".join(map(re.escape, sorted(others.get(parent, ()))))
        but = rf"(?!(?:{names})(?:\.|$))" if names else ""
        rules[rf"{re.escape(parent)}\.{but}[^.]+"] = form
    dynamic = {rf"+:^{name}(\.|$)": {"bits": form.bits, "group_size": form.group or -1} for name, form in rules.items()}
    section = {
        "quant_method": GPTQ,
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
    }
    return section | ({"dynamic": dynamic} if len({*rules.values()}) > 1 else {})


def describe_compressed_tensors(formats: Mapping[str, IntegerFormat]) -> dict[str, Any]:
    """Return the section of config.json for modules in these formats: one group of modules for each."""
    groups: dict[tuple[int, int], list[str]] = {}
    for module, form in formats.items():
        groups.setdefault((form.bits, form.group), []).append(module)
    scheme = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            f"group_{k}": {
                "targets": [f"re:.*{re.escape(module)}$" for module in modules],
                "weights": scheme
                | {"num_bits": bits, "strategy": "group" if group else "channel", "group_size": group or None},
            }
            for k, ((bits, group), modules) in enumerate(groups.items())
        },
    }


DESCRIBE = {GPTQ: describe_gptq, COMPRESSED_TENSORS: describe_compressed_tensors, GGUF: describe_blocks}


@dataclass(frozen=True)
class IntegerTensor(ComputedTensor):
    """A weight (out, in) in integers, which reads as float32; `parts` are its tensors, with the keys of `_NAMES`."""

    quant_method: str = ""
    parts: Mapping[str, TensorInfo] = field(default_factory=dict)
    n_bits: int = 0
    zero_offset: int = 0

    @property
    def float_dtype(self) -> str:
        """Dtype of the scales."""
        return self.parts["scales"].dtype

    @property
    def n_groups(self) -> int:
        """Number of groups of inputs."""
        return self.parts["scales"].shape[0 if self.quant_method == GPTQ else 1]

    def _rows(self, part: str) -> Array:
        """Return a tensor with the outputs along the first axis."""
        values = self.parts[part].read()
        return values.T if self.quant_method == GPTQ else values

    def codes(self) -> Array:
        """Return the codes (out, in)."""
        return _codes(self._rows("codes"), self.n_bits, self.shape[1])

    def zeros(self) -> Array:
        """Return the code of 0 (out, groups)."""
        if "zeros" not in self.parts:
            return np.full((self.shape[0], self.n_groups), 2 ** (self.n_bits - 1))
        return _codes(self._rows("zeros").T, self.n_bits, self.shape[0]).T + self.zero_offset

    def scales(self) -> Array:
        """Return the scales (out, groups), in float32."""
        scales = self._rows("scales")
        check_finite(self.name, self.file, scales)
        with np.errstate(over="ignore"):  # beyond float32: refused where the values are
            return scales.astype(np.float32)

    def groups(self) -> Array:
        """Return the group of every input (in,)."""
        name, n_in, n_groups = _NAMES[self.quant_method]["groups"], self.shape[1], self.n_groups
        groups = self.parts["groups"].read() if "groups" in self.parts else np.full(n_in, -1)
        if (groups < 0).all():  # the inputs are in order
            if n_in % n_groups:
                raise self._damaged(f"the {n_groups} groups must divide its {n_in} inputs without {name}")
            return np.arange(n_in) // (n_in // n_groups)
        if groups.min() < 0 or groups.max() >= n_groups:
            raise self._damaged(f"{name} must be in 0 to {n_groups - 1}, got {groups.min()} to {groups.max()}")
        return groups

    def read_stored(self) -> Array:
        """Return the values of the codes."""
        groups = self.groups()
        values = self.codes().astype(np.float32)
        values -= self.zeros()[:, groups]
        with np.errstate(over="ignore", invalid="ignore"):  # inf times 0 too
            values *= self.scales()[:, groups]
        return values

    def _damaged(self, problem: str) -> FileFormatError:
        return FileFormatError(
            f"open_checkpoint: the integers of {self.name!r} in {self.file} are damaged: {problem}; copy the file "
            "again."
        )


def with_dequantized(folder: Folder) -> Folder:
    """Return a folder in which weights in integers of an engine read as dense tensors of their own name.

    `FileFormatError` if tensors of a weight are missing or their shapes contradict each other.
    """
    section, config = quantization(folder.config)
    method, version = section.get("quant_method"), section.get("checkpoint_format", _VERSIONS[0])
    if method == GGUF:
        return replace(folder, tensors=with_dequantized_blocks(folder, section.get("types")), config=config)
    if method not in tuple(_NAMES):
        return folder
    if method == GPTQ and version not in _VERSIONS:
        raise FileFormatError(
            f"open_checkpoint: checkpoint_format in config.json of {folder.path} must be {' or '.join(_VERSIONS)}, got "
            f"{version!r:.80}; convert the checkpoint first."
        )
    tensors, offset = dict(folder.tensors), int(method == GPTQ and version == _VERSIONS[0])
    for module in [name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] == _NAMES[method]["codes"]]:
        named = {part: f"{module}.{name}" for part, name in _NAMES[method].items()}
        parts = {part: tensors.pop(name) for part, name in named.items() if name in tensors}
        tensors[f"{module}.weight"] = _integer_tensor(method, f"{module}.weight", parts, offset)
    return replace(folder, tensors=tensors, config=config)


def _integer_tensor(method: str, name: str, parts: Mapping[str, TensorInfo], zero_offset: int) -> IntegerTensor:
    """Return the weight of these tensors, whose bits and sides follow from their shapes."""
    first = parts["codes"]
    info = IntegerTensor(first.file, name, "F32", (0, 0), 0, sum(part.end - part.begin for part in parts.values()))
    info = replace(info, quant_method=method, parts=parts, zero_offset=zero_offset)
    for part, name in _NAMES[method].items():
        tensor, n_axes, dtypes = parts.get(part), 1 if part in _VECTORS else 2, _DTYPES[part]
        if tensor is None and name not in _OPTIONAL:
            raise info._damaged(f"they must have a tensor {name}, found none")
        if tensor is not None and (len(tensor.shape) != n_axes or not tensor.size or tensor.dtype not in dtypes):
            raise info._damaged(
                f"{name} must have {n_axes} axes of length 1 or more in {' or '.join(dtypes)}, got {tensor.shape} in "
                f"{tensor.dtype}"
            )
    (n_out, n_in), n_bits = _sides_and_bits(info)
    if n_in < _WORD or not 1 <= n_bits <= 8:  # fewer inputs in a word have no bits that are certain
        raise info._damaged(
            f"{_NAMES[method]['codes']} must hold 1 to 8 bits of {_WORD} inputs or more, got shape {first.shape} for "
            f"{n_in} inputs"
        )
    wanted = _shapes(method, n_bits, info.n_groups, (n_in, n_out))
    for part, tensor in parts.items():
        if tensor.shape != wanted[part]:
            raise info._damaged(f"{_NAMES[method][part]} must be of shape {wanted[part]}, got {tensor.shape}")
    return replace(info, shape=(n_out, n_in), n_bits=n_bits)


def _sides_and_bits(info: IntegerTensor) -> tuple[tuple[int, int], int]:
    """Return outputs and inputs, and the bits of a weight."""
    parts = info.parts
    if info.quant_method == COMPRESSED_TENSORS:
        shape = parts["shape"].read().tolist()
        if len(shape) != 2 or min(shape) < 1:
            raise info._damaged(f"weight_shape must be outputs and inputs, got {shape}")
        return (shape[0], shape[1]), parts["codes"].shape[1] * _WORD // shape[1]
    words, n_out = parts["codes"].shape
    if "groups" in parts:
        n_in = parts["groups"].shape[0]
        return (n_out, n_in), words * _WORD // n_in
    n_bits = parts["zeros"].shape[1] * _WORD // n_out
    return (n_out, words * _WORD // max(n_bits, 1)), n_bits


def _words(codes: Array, bits: int, axis: int) -> Array:
    """Return codes packed along an axis, which becomes the last one, in words of 32 bits."""
    packed = pack(codes, bits, axis)[:, : -(-codes.shape[axis] * bits // _WORD) * _WORD // 8]
    padded = np.zeros((len(packed), -(-packed.shape[1] // 4) * 4), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4")


def _codes(words: Array, bits: int, length: int) -> Array:
    """Return the first `length` codes of every row of words."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    n_bytes = -(-length // 8) * bits
    padded = np.zeros((len(packed), n_bytes), np.uint8)
    padded[:, : min(n_bytes, packed.shape[1])] = packed[:, :n_bytes]
    return unpack(padded, bits, 1, length).astype(np.int16)
