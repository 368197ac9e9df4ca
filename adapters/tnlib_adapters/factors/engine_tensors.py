"""Linear layers in the integers that inference engines read: GPTQ (v2) and compressed-tensors (pack-quantized).

A weight W (in, out) has codes q, and a scale s and an integer zero z for every group of inputs and every output,

    W_ij = s_gj (q_ij - z_gj),        g = group of input i.

tnlib writes z = 2^(bits - 1) and consecutive groups, `IntegerFormat(bits, axis=0, group, has_zero=True)`. Both formats
are read with any zeros and any order of the inputs, from any writer: such a folder opens as the dense model.

Codes are a little-endian stream of bits in words of 32, along the inputs; zeros likewise, along the outputs.

    GPTQ                 qweight (in bits / 32, out), qzeros (groups, out bits / 32), scales (groups, out), g_idx (in)
    compressed-tensors   weight_packed (out, in bits / 32), weight_scale (out, groups), weight_shape (2,),
                         weight_zero_point (out bits / 32, groups) unless z = 2^(bits - 1), weight_g_idx (in) if ordered
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.factors.config_section import quantization
from tnlib_adapters.factors.integers import IntegerFormat, Integers, pack, unpack
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.tensor_file import FLOATS, TensorInfo, check_finite, to_bf16

GPTQ, COMPRESSED_TENSORS = "gptq", "compressed-tensors"
_WORD = 32  # bits
_CODES = {GPTQ: "qweight", COMPRESSED_TENSORS: "weight_packed"}  # the tensor that stands for a weight


def encode_gptq(integers: Integers) -> dict[str, tuple[str, Array]]:
    """Return {name below the module: (dtype, array)} of a weight (in, out) for GPTQ, version 2.

    Both sides are multiples of 32.
    """
    form, (n_in, n_out) = integers.format, integers.codes.shape
    zeros = np.full((form.n_groups(n_in), n_out), 2 ** (form.bits - 1) - 1, np.uint8)
    group = form.group or n_in
    return {
        "qweight": ("I32", np.ascontiguousarray(_words(_unsigned(integers), form.bits, axis=0).T)),
        "qzeros": ("I32", _words(zeros, form.bits, axis=1)),
        "scales": ("BF16", to_bf16(integers.scales)),
        "g_idx": ("I32", (np.arange(n_in) // group).astype(np.int32)),
    }


def encode_compressed_tensors(integers: Integers) -> dict[str, tuple[str, Array]]:
    """Return {name below the module: (dtype, array)} of a weight (in, out) for compressed-tensors, pack-quantized."""
    return {
        "weight_packed": ("I32", _words(_unsigned(integers), integers.format.bits, axis=0)),
        "weight_scale": ("BF16", to_bf16(np.ascontiguousarray(integers.scales.T))),
        "weight_shape": ("I64", np.array(integers.codes.shape[::-1], np.int64)),
    }


def stored_shapes(
    stored_as: str, form: IntegerFormat, shape: tuple[int, ...]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name below the module: (dtype, shape)} of a weight (in, out) as it is encoded.

    >>> stored_shapes(COMPRESSED_TENSORS, IntegerFormat(3, 0, 32, has_zero=True), (64, 32))["weight_packed"]
    ('I32', (32, 6))
    """
    n_in, n_out = shape
    n_groups, words = form.n_groups(n_in), -(-n_in * form.bits // _WORD)
    if stored_as == GPTQ:
        return {
            "qweight": ("I32", (words, n_out)),
            "qzeros": ("I32", (n_groups, n_out * form.bits // _WORD)),
            "scales": ("BF16", (n_groups, n_out)),
            "g_idx": ("I32", (n_in,)),
        }
    return {
        "weight_packed": ("I32", (n_out, words)),
        "weight_scale": ("BF16", (n_out, n_groups)),
        "weight_shape": ("I64", (2,)),
    }


ENCODE = {GPTQ: encode_gptq, COMPRESSED_TENSORS: encode_compressed_tensors}


def describe_gptq(formats: Mapping[str, IntegerFormat]) -> dict[str, Any]:
    """Return the section of config.json for modules in these formats: the most frequent, and those that differ."""
    bits, group = _most_frequent(formats)
    dynamic = {
        rf"+:^{_escaped(module)}(\.|$)": {"bits": form.bits, "group_size": form.group or -1}
        for module, form in formats.items()
        if (form.bits, form.group) != (bits, group)
    }
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
    return section | ({"dynamic": dynamic} if dynamic else {})


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
                "targets": [f"re:.*{_escaped(module)}$" for module in modules],
                "weights": scheme
                | {"num_bits": bits, "strategy": "group" if group else "channel", "group_size": group or None},
            }
            for k, ((bits, group), modules) in enumerate(groups.items())
        },
    }


DESCRIBE = {GPTQ: describe_gptq, COMPRESSED_TENSORS: describe_compressed_tensors}


def _most_frequent(formats: Mapping[str, IntegerFormat]) -> tuple[int, int]:
    kinds = [(form.bits, form.group) for form in formats.values()]
    return max(sorted(set(kinds)), key=kinds.count)


def _escaped(module: str) -> str:
    return module.replace(".", r"\.")


@dataclass(frozen=True)
class IntegerTensor(TensorInfo):
    """A weight (out, in) in integers, which reads as float32; `parts` are the tensors that it is made from."""

    quant_method: str = ""
    parts: Mapping[str, TensorInfo] = field(default_factory=dict)
    n_bits: int = 0
    zero_offset: int = 0

    @property
    def float_dtype(self) -> str:
        """Dtype of the scales."""
        return self.parts["scales" if self.quant_method == GPTQ else "weight_scale"].dtype

    @property
    def n_groups(self) -> int:
        """Number of groups of inputs."""
        gptq = self.quant_method == GPTQ
        return self.parts["scales"].shape[0] if gptq else self.parts["weight_scale"].shape[1]

    def read_integers(self) -> tuple[Array, Array, Array, Array]:
        """Return codes (out, in), zeros and scales (out, groups), and the group of every input."""
        n_out, n_in = self.shape
        arrays = {name: part.read() for name, part in self.parts.items()}
        if self.quant_method == GPTQ:
            codes = _codes(arrays["qweight"].T, self.n_bits, n_in)  # out, in
            zeros = _codes(arrays["qzeros"], self.n_bits, n_out).T + self.zero_offset  # out, groups
            scales, groups = arrays["scales"].T, arrays.get("g_idx")
        else:
            codes, scales = _codes(arrays["weight_packed"], self.n_bits, n_in), arrays["weight_scale"]
            zeros = np.full(scales.shape, 2 ** (self.n_bits - 1))
            if "weight_zero_point" in arrays:
                zeros = _codes(arrays["weight_zero_point"].T, self.n_bits, n_out).T
            groups = arrays.get("weight_g_idx")
        if groups is None or (groups < 0).all():
            groups = np.arange(n_in) // -(-n_in // scales.shape[1])
        if groups.min() < 0 or groups.max() >= scales.shape[1]:
            raise self._damaged(
                f"inputs are in groups 0 to {scales.shape[1] - 1}, got {groups.min()} to {groups.max()}"
            )
        check_finite(self.name, self.file, scales)
        return codes, zeros, scales, groups

    def read_stored(self) -> Array:
        """Return the values of the codes."""
        codes, zeros, scales, groups = self.read_integers()
        values = codes.astype(np.float32)
        values -= zeros[:, groups]
        values *= scales[:, groups]
        return values

    def read_part(self, index: tuple[slice, ...]) -> Array:
        """Return the values of some rows and columns."""
        part: Array = self.read_finite()[index]
        return part

    def _damaged(self, problem: str) -> FileFormatError:
        return FileFormatError(
            f"open_checkpoint: the integers of {self.name!r} in {self.file} are damaged: {problem}; copy the file "
            "again."
        )


def with_dequantized(folder: Folder) -> Folder:
    """Return a folder in which weights in integers of an engine read as dense tensors of their own name.

    Raises
    ------
    FileFormatError
        If tensors of a weight are missing or their shapes contradict each other.
    """
    section, config = quantization(folder.config)
    method = section.get("quant_method")
    if method not in tuple(_CODES):
        return folder
    tensors, prefixes = dict(folder.tensors), dict[str, str]()
    v1 = method == GPTQ and section.get("checkpoint_format", "gptq") == "gptq"
    for name, info in folder.tensors.items():
        module, _, own = name.rpartition(".")
        if own == _CODES[method]:
            prefixes[module] = info.name
    for module in prefixes:
        names = [name for name in folder.tensors if name.rpartition(".")[0] == module and not name.endswith(".bias")]
        parts = {name.rpartition(".")[2]: tensors.pop(name) for name in names}
        tensors[f"{module}.weight"] = _integer_tensor(method, f"{module}.weight", parts, zero_offset=int(v1))
    return replace(folder, tensors=tensors, config=config)


def _integer_tensor(method: str, name: str, parts: Mapping[str, TensorInfo], *, zero_offset: int) -> IntegerTensor:
    """Return the weight of these tensors, whose bits and sides follow from their shapes."""
    first = next(iter(parts.values()))
    info = IntegerTensor(first.file, name, "F32", (0, 0), 0, sum(part.end - part.begin for part in parts.values()))
    info = replace(info, quant_method=method, parts=parts, zero_offset=zero_offset)
    wanted = {"qweight", "qzeros", "scales", "g_idx"} if method == GPTQ else {"weight_packed", "weight_scale"}
    missing, shapes = wanted - parts.keys() - {"g_idx"}, {part: own.shape for part, own in parts.items()}
    if missing or any(len(shapes[part]) != 2 for part in wanted & parts.keys() - {"g_idx"}):
        raise info._damaged(f"they are tensors {', '.join(sorted(wanted))}, got shapes {shapes}")
    if method == GPTQ:
        words, n_out = shapes["qweight"]
        n_groups = shapes["scales"][0]
        n_bits = shapes["qzeros"][1] * _WORD // n_out
        n_in = shapes["g_idx"][0] if "g_idx" in parts else words * _WORD // (n_bits or 1)
        if shapes["scales"] != (n_groups, n_out) or shapes["qzeros"][0] != n_groups:
            raise info._damaged(f"scales and zeros have a row for every group, got shapes {shapes}")
    else:
        n_out, words = shapes["weight_packed"]
        n_out, n_in = parts["weight_shape"].read().tolist() if "weight_shape" in parts else (n_out, 0)
        n_bits = words * _WORD // n_in if n_in > 0 else 0
        if shapes["weight_packed"][0] != n_out or shapes["weight_scale"][0] != n_out:
            raise info._damaged(f"codes and scales have a row for every output, got shapes {shapes}")
    if not 1 <= n_bits <= 8 or words != -(-n_in * n_bits // _WORD):
        raise info._damaged(f"codes have 1 to 8 bits, got shapes {shapes}")
    scales = parts["scales" if method == GPTQ else "weight_scale"]
    if scales.dtype not in FLOATS or any(own.dtype not in ("I32", "I64", *FLOATS) for own in parts.values()):
        raise info._damaged(f"codes are I32 and scales floats, got {', '.join(own.dtype for own in parts.values())}")
    return replace(info, shape=(n_out, n_in), n_bits=n_bits)


def _unsigned(integers: Integers) -> Array:
    codes = integers.codes
    return codes if integers.format.is_packed else (codes.astype(np.int16) + 128).astype(np.uint8)


def _words(codes: Array, bits: int, axis: int) -> Array:
    """Return codes packed along an axis, which becomes the last one, in words of 32 bits."""
    packed = np.moveaxis(codes, axis, -1) if bits == 8 else pack(codes, bits, axis)
    padded = np.zeros((len(packed), -(-packed.shape[1] // 4) * 4), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4")


def _codes(words: Array, bits: int, length: int) -> Array:
    """Return the first `length` codes of every row of words."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return packed[:, :length].astype(np.int16)
    n_bytes = -(-length // 8) * bits
    padded = np.zeros((len(packed), n_bytes), np.uint8)
    padded[:, : min(n_bytes, packed.shape[1])] = packed[:, :n_bytes]
    return unpack(padded, bits, 1, length).astype(np.int16)
