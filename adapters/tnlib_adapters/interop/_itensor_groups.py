"""HDF5 groups of ITensor (Julia and C++): Index, IndexSet and ITensor, dense or block-sparse with quantum numbers.

    <name>              type "ITensor"
      inds              type "IndexSet": length, index_1 ... index_N
        index_k         type "Index", space_type "Int" or "QNBlocks": id, dim, dir, plev, tags/tags, space/dims
      storage           "store" before ITensors.jl 0.2; type "Dense{Float64}", "BlockSparse{ComplexF64}", ...
        data            flat, first index fastest

An Index is identified by id, plev and tags, not by the position of a leg. Type strings are compared with a list and
never evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.interop._hdf5 import Node

_DTYPES = {"Float32": np.float32, "Float64": np.float64, "ComplexF32": np.complex64, "ComplexF64": np.complex128}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_STORAGES = [f"{kind}{{{name}}}" for kind in ("Dense", "BlockSparse") for name in _DTYPES]
_LONG_NAMES = re.compile(r"\bComplex\{Float(32|64)\}")  # ComplexF32, ComplexF64 in some versions of Julia


@dataclass(frozen=True)
class Index:
    """One leg; two legs with equal id, prime level and tags are contracted."""

    id: int
    plev: int
    tags: str
    dim: int = field(compare=False)
    dir: int = field(compare=False, default=0)
    blocks: tuple[int, ...] = field(compare=False, default=())  # sizes of the sectors of a QN index


def expect(group: Node, kind: str) -> None:
    """Raise unless a group has this type and version 1 of its layout."""
    stored = group.text_attribute("type", "")
    if stored != kind:
        group.refuse(f"must have type {kind!r}", repr(stored))
    version = group.integer_attribute("version", 1)
    if version != 1:
        group.refuse("must have version 1 of its layout", str(version), "save it with a version of ITensor of today")


def read_tensor(group: Node) -> tuple[Array, list[Index]]:
    """Return a tensor as a dense array, and its legs in the order of the file."""
    expect(group, "ITensor")
    legs = _read_indices(group.child("inds"))
    shape = tuple(leg.dim for leg in legs)
    storage = group.child("storage" if "storage" in group.names() else "store")
    stored = _LONG_NAMES.sub(r"ComplexF\1", storage.text_attribute("type", ""))
    if stored not in _STORAGES:
        storage.refuse(f"must have one of the types {', '.join(_STORAGES)}", repr(stored), "make it dense first")
    kind, name = stored.rstrip("}").split("{")
    dtype = np.dtype(_DTYPES[name])
    group.check_dense(shape, dtype)
    data = _read_data(storage, dtype)
    if kind == "BlockSparse":
        return _from_blocks(storage, data, legs), legs
    if data.size != math.prod(shape):
        storage.refuse(f"must hold {math.prod(shape)} numbers for its indices", str(data.size))
    return data.reshape(shape, order="F"), legs


def _read_indices(group: Node) -> list[Index]:
    expect(group, "IndexSet")
    return [_read_index(group.child(f"index_{n}")) for n in range(1, group.child("length").integer() + 1)]


def _read_index(group: Node) -> Index:
    expect(group, "Index")
    tags = group.child("tags")
    expect(tags, "TagSet")
    names = tags.child("tags").text()
    id, plev, dim, direction = (group.child(name).integer() for name in ("id", "plev", "dim", "dir"))
    space = group.text_attribute("space_type", "Int")
    if space not in ("Int", "QNBlocks"):
        group.refuse("must have space_type 'Int' or 'QNBlocks'", repr(space))
    blocks = (dim,) if space == "Int" else tuple(map(int, group.child("space").child("dims").numbers("iu").ravel()))
    if dim < 1 or min(blocks, default=0) < 1 or sum(blocks) != dim:
        group.refuse("must have sectors that add up to its positive dim", f"{blocks} and {dim}")
    names = ",".join(sorted(name.strip() for name in names.split(",")))
    return Index(id, plev, names, dim, direction, blocks)


def _read_data(storage: Node, dtype: np.dtype[Any]) -> Array:
    """Return the flat data; complex numbers are pairs of fields (Julia) or pairs on a last axis (C++)."""
    data = storage.child("data")
    flat = data.numbers("fc")
    if data.attribute("__complex__") is not None:
        if flat.ndim != 2 or flat.shape[1] != 2 or flat.dtype.kind != "f":
            data.refuse("must hold pairs of real numbers", f"{flat.dtype} of shape {flat.shape}")
        flat = flat[:, 0] + 1j * flat[:, 1]
    if flat.ndim != 1 or flat.dtype.newbyteorder("=") != dtype:
        data.refuse(f"must hold a vector of {dtype}", f"{flat.dtype} of shape {flat.shape}")
    if not np.isfinite(flat).all():
        first = int(np.argmin(np.isfinite(flat)))
        data.refuse("must be finite", f"{flat[first]} at index {first}", "repair the tensor first")
    return flat.astype(dtype, copy=False)


def _from_blocks(storage: Node, data: Array, legs: Sequence[Index]) -> Array:
    """Return the dense tensor from blocks (coordinates from 1, offset from 0), first index fastest."""
    order, table = len(legs), storage.child("offsets").numbers("iu").ravel()
    n_legs = storage.child("ndims").integer()
    if n_legs != order and table.size:
        storage.refuse(f"must have {order} legs like its indices", str(n_legs))
    if table.size % (order + 1):
        storage.refuse(f"must list blocks by {order + 1} integers each", f"{table.size} of {table.dtype}")
    starts = [np.concatenate([[0], np.cumsum(leg.blocks)]) for leg in legs]
    out = np.zeros([leg.dim for leg in legs], data.dtype)
    for *block, offset in table.reshape(-1, order + 1).tolist():
        if any(not 1 <= b <= len(leg.blocks) for b, leg in zip(block, legs, strict=True)):
            storage.refuse("must list blocks that its indices have", str(block))
        shape = [leg.blocks[b - 1] for b, leg in zip(block, legs, strict=True)]
        part = data[offset : offset + math.prod(shape)] if offset >= 0 else data[:0]
        if part.size != math.prod(shape):
            storage.refuse(f"must hold the block {block} of {math.prod(shape)} numbers", f"{part.size} at {offset}")
        region = tuple(slice(s[b - 1], s[b]) for s, b in zip(starts, block, strict=True))
        out[region] = part.reshape(shape, order="F")
    return out


def start_group(parent: Any, name: str, kind: str) -> Any:
    """Create a group with the two attributes of every ITensor group."""
    group = parent.create_group(name)
    _write_text(group, "type", kind)
    group.attrs["version"] = np.int64(1)
    return group


def write_tensor(parent: Any, name: str, a: Array, legs: Sequence[Index]) -> None:
    """Write a dense tensor in the layout of ITensors.jl."""
    group = start_group(parent, name, "ITensor")
    indices = start_group(group, "inds", "IndexSet")
    indices["length"] = np.int64(len(legs))
    for n, leg in enumerate(legs, start=1):
        _write_index(indices, f"index_{n}", leg)
    storage = start_group(group, "storage", f"Dense{{{_NAMES[a.dtype]}}}")
    storage["data"] = a.ravel(order="F")  # complex numbers are stored as pairs (r, i), as in Julia


def _write_index(parent: Any, name: str, leg: Index) -> None:
    group = start_group(parent, name, "Index")
    _write_text(group, "space_type", "Int")
    group["id"] = np.uint64(leg.id)
    for key, value in (("dim", leg.dim), ("dir", leg.dir), ("plev", leg.plev)):
        group[key] = np.int64(value)
    _write_text(start_group(group, "tags", "TagSet"), "tags", leg.tags, dataset=True)


def _write_text(group: Any, name: str, text: str, *, dataset: bool = False) -> None:
    """Write a string as Julia does: UTF-8 of fixed length."""
    from h5py import h5a, h5d, h5p, h5s, h5t

    raw = text.encode()
    kind = h5t.C_S1.copy()
    kind.set_size(len(raw))
    kind.set_cset(h5t.CSET_UTF8)
    space = h5s.create(h5s.SCALAR)
    if dataset:
        untimed = h5p.create(h5p.DATASET_CREATE)
        untimed.set_obj_track_times(False)  # reproducible files, as h5py writes them
        item = h5d.create(group.id, name.encode(), kind, space, dcpl=untimed)
    else:
        item = h5a.create(group.id, name.encode(), kind, space)
    array = np.array(raw, f"S{len(raw)}")
    # equal types in memory and in the file; a conversion would replace the last letter by a zero
    if dataset:
        item.write(h5s.ALL, h5s.ALL, array, mtype=kind)
    else:
        item.write(array, mtype=kind)
