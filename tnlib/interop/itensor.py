"""ITensor HDF5 files, shared by ITensors.jl, ITensorMPS.jl and the C++ library.

    <name>              type "MPS", "MPO" or "ITensor"; a chain has length, llim, rlim, MPS[1] ... MPS[N]
      inds              type "IndexSet": length, index_1 ... index_N
        index_k         type "Index", space_type "Int" or "QNBlocks": id, dim, dir, plev, tags/tags, space/dims
      storage           "store" before ITensors.jl 0.2; type "Dense{Float64}", "BlockSparse{ComplexF64}", ...
        data            flat, first index fastest

An Index is identified by id, plev and tags, not by the position of a leg. Type strings are compared with a list and
never evaluated.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.formats.train.cores import find_center
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.interop.core_arrays import as_one_precision, with_scale, wrong_value
from tnlib.interop.safe_hdf5 import HDF5Item, open_hdf5, write_hdf5

Value: TypeAlias = TensorTrain | TTMatrix | Array

_KINDS = ("MPS", "MPO", "ITensor")


def read(path: str | os.PathLike[str], *, name: str | None = None) -> Value:
    """Return the state, operator or tensor in an HDF5 file of ITensor.

    Parameters
    ----------
    path
        The file.
    name
        Name of the object in the file; optional if there is only one.

    Returns
    -------
    TensorTrain | TTMatrix | numpy.ndarray
        TensorTrain of an MPS, cores in the order of its sites; TTMatrix of an MPO, the primed site leg as row; array of
        an ITensor, legs in the order of the file. Block-sparse tensors become dense; physical basis order and dtype are
        preserved. `center` is measured on the cores; llim and rlim are ignored.

    Raises
    ------
    FileFormatError
        If the file is damaged, or holds no such object, another storage type, NaN or inf, or a chain that is not open;
        if it leads to data in other files (external links and storage, virtual datasets, soft links), or would take
        more memory than 10 times its size as stored, and 16 times when blocks become dense tensors (and 8 MiB each).
    MissingFileError
        If there is no such file.

    References
    ----------
    M. Fishman, S. R. White, E. M. Stoudenmire, "The ITensor software library for tensor network calculations", SciPost
    Phys. Codebases 4 (2022); HDF5 file formats in the documentation of ITensors.jl.

    Examples
    --------
    >>> import numpy as np, os, tempfile, tnlib
    >>> from tnlib_adapters.interop import itensor
    >>> bell = tnlib.tt_svd(np.eye(2) / np.sqrt(2)).value
    >>> path = os.path.join(tempfile.mkdtemp(), "bell.h5")
    >>> itensor.write(path, bell)
    >>> f"{tnlib.entropy(itensor.read(path), 1) / np.log(2):.4f}"
    '1.0000'
    """
    with open_hdf5("itensor.read", path) as root:
        group = _choose(root, name)
        kind = group.text_attribute("type", "")
        expect(group, kind)
        if kind == "ITensor":
            return read_tensor(group)[0]
        length, left, right = (group.child(limit).integer() for limit in ("length", "llim", "rlim"))
        tensors = [read_tensor(group.child(f"{kind}[{n}]")) for n in range(1, length + 1)]
        chain = _chain(group, tensors, 1 if kind == "MPS" else 2)
        try:
            cores = as_one_precision("itensor.read", "tensor", chain)
            return (TensorTrain if kind == "MPS" else TTMatrix)(
                cores, find_center(cores, left if right - left == 2 else None)
            )
        except (ArgumentError, ArgumentTypeError) as problem:
            group.refuse(f"must hold a valid {kind}", str(problem))


def write(path: str | os.PathLike[str], value: Value, *, name: str | None = None) -> None:
    """Write a state, operator or tensor atomically to an HDF5 file that Julia and C++ can read.

    Parameters
    ----------
    path
        Output file; an existing file is replaced.
    value
        A TensorTrain becomes an MPS, a TTMatrix an MPO (rows primed), an array an ITensor. C++ reads float64 and
        complex128 only.
    name
        Name of the group; "psi", "H" or "T" by default.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format.
    ArgumentError
        If the scale of `value` exceeds the range of its dtype: ITensor stores no separate scale.
    MissingFileError
        If the folder of `path` does not exist.

    Notes
    -----
    Site indices have tags "Site,n=1", ... and ids that depend on site and dimension only, so that separately written
    states and operators can be contracted; replace the ids before contracting with other tensors. Link ids depend on
    the cores.

    Examples
    --------
    >>> import os, tempfile, tnlib
    >>> from tnlib_adapters.interop import itensor
    >>> path = os.path.join(tempfile.mkdtemp(), "state.h5")
    >>> itensor.write(path, tnlib.ones((2, 3, 2)))
    >>> itensor.read(path).shape, itensor.read(path, name="psi").ranks
    ((2, 3, 2), (1, 1, 1, 1))
    """
    if not isinstance(value, TensorTrain | TTMatrix | np.ndarray):
        raise wrong_value("itensor.write", value, "a TensorTrain, a TTMatrix or an array")
    if name is None:
        name = "psi" if isinstance(value, TensorTrain) else "H" if isinstance(value, TTMatrix) else "T"
    if not isinstance(name, str) or not name.strip("./") or "/" in name:
        raise ArgumentTypeError(f"itensor.write: name must name a group, got {name!r}; pass for example name='psi'.")
    if isinstance(value, np.ndarray):
        a = as_array("itensor.write", "value", value)
        legs = [Index(_id("leg", k, n), 0, f"leg={k + 1}", n) for k, n in enumerate(a.shape)]
        write_hdf5("itensor.write", path, lambda opened: write_tensor(opened, name, a, legs))
        return
    cores = with_scale("itensor.write", value)
    write_hdf5("itensor.write", path, lambda opened: _write_chain(opened, name, cores, value.center))


def _choose(root: HDF5Item, name: str | None) -> HDF5Item:
    """Return the requested group, or the only one."""
    kinds = {key: root.child(key).text_attribute("type", "") for key in root.names() if root.holds(key)}
    names = [key for key, kind in kinds.items() if kind in _KINDS]
    expected = f"must hold one {', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
    if name is not None:
        if name not in names:
            root.refuse(f"{expected} named {name!r}", f"{names or root.names()}", "pass one of these names")
        return root.child(name)
    if not names:
        root.refuse(expected, f"groups of the types {sorted(set(kinds.values()) - {''})}", "read another file")
    if len(names) > 1:
        root.refuse(expected, str(names), f"pass for example name={names[0]!r}")
    return root.child(names[0])


def _chain(group: HDF5Item, tensors: Sequence[tuple[Array, list[Index]]], n_sites: int) -> list[Array]:
    """Return cores (l, site legs ..., r); links are the legs shared by two tensors."""
    tensors_of_leg = defaultdict(list)
    for n, (_, legs) in enumerate(tensors):
        for leg in legs:
            tensors_of_leg[leg].append(n)
    for leg, owners in tensors_of_leg.items():
        if len(owners) > 2 or (len(owners) == 2 and owners[1] - owners[0] != 1):
            numbers = ", ".join(str(n + 1) for n in owners)
            group.refuse("must be an open chain", f"index {leg.tags!r} in tensors {numbers}", "cut cyclic chains open")
    return [
        _core(group, n, a, legs, [tensors_of_leg[leg] for leg in legs], n_sites) for n, (a, legs) in enumerate(tensors)
    ]


def _core(group: HDF5Item, n: int, a: Array, legs: Sequence[Index], owners: Sequence[list[int]], n_sites: int) -> Array:
    """Return the core of tensor `n`; `owners` are the numbers of the tensors that have each of its legs."""
    left, right, alone = ([k for k, of_leg in enumerate(owners) if of_leg == o] for o in ([n - 1, n], [n, n + 1], [n]))
    sites = [k for k in alone if len(alone) == n_sites or legs[k].dim > 1 or "Link" not in legs[k].tags]
    if len(sites) != n_sites:
        group.refuse(
            f"must have {n_sites} site leg{'s' if n_sites > 1 else ''} on every tensor",
            f"{[legs[k].tags for k in sites]} on tensor {n + 1}",
        )
    if n_sites == 2:
        sites.sort(key=lambda k: (-legs[k].plev, -legs[k].dir))  # rows are primed, or else outgoing
        if (legs[sites[0]].plev, legs[sites[0]].dir) == (legs[sites[1]].plev, legs[sites[1]].dir):
            group.refuse("must prime its row legs", f"two alike on tensor {n + 1}", "prime one in ITensor")
    # both tensors at a bond list its legs in the order of their ids
    left, right = (sorted(side, key=lambda k: (legs[k].id, legs[k].plev, legs[k].tags)) for side in (left, right))
    dropped = [k for k in alone if k not in sites]
    turned = a.transpose(left + sites + right + dropped)  # l ... s (s') r ... 1 ...
    shape = [legs[k].dim for k in sites]
    rows = int(np.prod([legs[k].dim for k in left], dtype=int))
    return turned.reshape(rows, *shape, -1)


def _write_chain(opened: Any, name: str, cores: Sequence[Array], center: int | None) -> None:
    kind = "MPS" if cores[0].ndim == 3 else "MPO"
    group = start_group(opened, name, kind)
    d = len(cores)
    group["length"] = np.int64(d)
    group["rlim"] = np.int64(d + 1 if center is None else center + 2)
    group["llim"] = np.int64(0 if center is None else center)
    digest = hashlib.blake2b(b"".join(core.tobytes() for core in cores)).digest()
    links = [Index(_id("link", k, digest), 0, f"Link,l={k}", cores[k].shape[0]) for k in range(1, d)]
    for k, core in enumerate(cores):
        sizes = core.shape[1:-1]
        primes = [0] if kind == "MPS" else [1, 0]
        sites = [Index(_id("site", k, n), p, f"Site,n={k + 1}", n) for n, p in zip(sizes, primes, strict=True)]
        legs = [*links[max(k - 1, 0) : k], *sites, *links[k : k + 1]]
        write_tensor(group, f"{kind}[{k + 1}]", core.reshape([leg.dim for leg in legs]), legs)


def _id(*what: object) -> int:
    """Return a 64-bit hash of `what`, stable between runs."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little")


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


def expect(group: HDF5Item, kind: str) -> None:
    """Raise unless a group has this type and version 1 of its layout."""
    stored = group.text_attribute("type", "")
    if stored != kind:
        group.refuse(f"must have type {kind!r}", repr(stored))
    version = group.integer_attribute("version", 1)
    if version != 1:
        group.refuse("must have version 1 of its layout", str(version), "save it with a version of ITensor of today")


def read_tensor(group: HDF5Item) -> tuple[Array, list[Index]]:
    """Return a tensor as a dense array, and its legs in the order of the file."""
    expect(group, "ITensor")
    indices = group.child("inds")
    expect(indices, "IndexSet")
    legs = [_read_index(indices.child(f"index_{n}")) for n in range(1, indices.child("length").integer() + 1)]
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


def _read_index(group: HDF5Item) -> Index:
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


def _read_data(storage: HDF5Item, dtype: np.dtype[Any]) -> Array:
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


def _from_blocks(storage: HDF5Item, data: Array, legs: Sequence[Index]) -> Array:
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
        index = start_group(indices, f"index_{n}", "Index")
        _write_text(index, "space_type", "Int")
        index["id"] = np.uint64(leg.id)
        for key, value in (("dim", leg.dim), ("dir", leg.dir), ("plev", leg.plev)):
            index[key] = np.int64(value)
        _write_text(start_group(index, "tags", "TagSet"), "tags", leg.tags, dataset=True)
    storage = start_group(group, "storage", f"Dense{{{_NAMES[a.dtype]}}}")
    storage["data"] = a.ravel(order="F")  # complex numbers are stored as pairs (r, i), as in Julia


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
