"""Read and write ITensor HDF5 files, shared by ITensors.jl, ITensorMPS.jl and the C++ library."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib_adapters.interop._cores import as_one_precision, find_center, with_scale, wrong_value
from tnlib_adapters.interop._hdf5 import Node, open_hdf5, write_hdf5
from tnlib_adapters.interop._itensor_groups import (
    Index,
    expect,
    read_tensor,
    start_group,
    write_tensor,
)

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
    See `read`.
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


def _choose(root: Node, name: str | None) -> Node:
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


def _chain(group: Node, tensors: Sequence[tuple[Array, list[Index]]], n_sites: int) -> list[Array]:
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
        _core(
            group,
            n,
            a,
            legs,
            [legs.index(leg) for leg in legs if len(tensors_of_leg[leg]) == 1],
            tensors_of_leg,
            n_sites,
        )
        for n, (a, legs) in enumerate(tensors)
    ]


def _core(
    group: Node,
    n: int,
    a: Array,
    legs: list[Index],
    alone: list[int],
    tensors_of_leg: dict[Index, list[int]],
    n_sites: int,
) -> Array:
    left = [k for k, leg in enumerate(legs) if tensors_of_leg[leg] == [n - 1, n]]
    right = [k for k, leg in enumerate(legs) if tensors_of_leg[leg] == [n, n + 1]]
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
