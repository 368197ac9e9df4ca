"""ITensor files laid out by a plain writer, in any order of legs, dense or in blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DTYPES = {"Float32": "f4", "Float64": "f8", "ComplexF32": "c8", "ComplexF64": "c16"}

Leg = dict[str, Any]


def leg(name: str, dim: int, *, id: int, plev: int = 0, dir: int = 0, blocks: Sequence[int] = ()) -> Leg:
    return {"id": id, "tags": name, "dim": dim, "plev": plev, "dir": dir, "blocks": list(blocks)}


def put_group(parent: Any, name: str, kind: str, version: int = 1) -> Any:
    group = parent.create_group(name)
    group.attrs["type"], group.attrs["version"] = kind, version  # h5py writes strings of variable length: C++ may too
    return group


def put_tensor(
    parent: Any, name: str, a: np.ndarray, legs: Sequence[Leg], *, storage: str = "storage", cpp: bool = False
) -> Any:
    group = put_group(parent, name, "ITensor")
    inds = put_group(group, "inds", "IndexSet")
    inds["length"] = len(legs)
    for n, one in enumerate(legs, start=1):
        index = put_group(inds, f"index_{n}", "Index")
        index.attrs["space_type"] = "QNBlocks" if one["blocks"] else "Int"
        for key in ("dim", "plev", "dir"):
            index[key] = one[key]
        index["id"] = np.uint64(one["id"])
        put_group(index, "tags", "TagSet")["tags"] = one["tags"]
        if one["blocks"]:
            space = put_group(index, "space", "QNBlocks")
            space["length"], space["dims"] = len(one["blocks"]), one["blocks"]
    kind = next(name for name, dtype in DTYPES.items() if a.dtype == np.dtype(dtype))
    if any(one["blocks"] for one in legs):
        store = put_group(group, storage, f"BlockSparse{{{kind}}}")
        data, offsets = in_blocks(a, [one["blocks"] for one in legs])
        store["ndims"], store["offsets"] = a.ndim, np.array(offsets, np.int64)
    else:
        store, data = put_group(group, storage, f"Dense{{{kind}}}"), a.ravel(order="F")
    if cpp and np.iscomplexobj(data):
        store["data"] = np.stack([data.real, data.imag], axis=1)
        store["data"].attrs["__complex__"] = "1"
    else:
        store["data"] = data
    return group


def in_blocks(a: np.ndarray, blocks: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[int]]:
    """The blocks that are not zero, one after the other, and where they lie; the last one first."""
    starts = [np.concatenate([[0], np.cumsum(sizes)]) for sizes in blocks]
    parts, offsets, offset = [], [], 0
    for block in reversed(list(itertools.product(*(range(len(sizes)) for sizes in blocks)))):
        part = a[tuple(slice(s[b], s[b + 1]) for s, b in zip(starts, block, strict=True))]
        if part.any():
            parts.append(part.ravel(order="F"))
            offsets += [*(b + 1 for b in block), offset]
            offset += part.size
    return np.concatenate([np.zeros(0, a.dtype), *parts]), offsets


def put_empty_chain(file: Any, name: str, kind: str, length: int, limits: tuple[int, int] | None = None) -> Any:
    group = put_group(file, name, kind)
    group["length"] = length
    group["llim"], group["rlim"] = limits or (0, length + 1)
    return group


def put_chain(
    file: Any,
    name: str,
    cores: Sequence[np.ndarray],
    *,
    order: Callable[[list[Leg]], list[Leg]] = lambda legs: legs,
    limits: tuple[int, int] | None = None,
    **how: Any,
) -> Any:
    """Write cores (l, n, r) or (l, m, n, r) with the legs of every tensor in any `order`."""
    d, kind = len(cores), "MPS" if cores[0].ndim == 3 else "MPO"
    group = put_empty_chain(file, name, kind, d, limits)
    for k, core in enumerate(cores):
        sites = [leg(f"S=1/2,Site,n={k + 1}", core.shape[1], id=7_000 + k, plev=int(kind == "MPO"))]
        if kind == "MPO":
            sites.append(leg(f"S=1/2,Site,n={k + 1}", core.shape[2], id=7_000 + k))
        # ids that fall, and fill 64 bits
        links = [leg(f"Link,l={b}", core.shape[s], id=2**64 - 1 - b) for b, s in ((k, 0), (k + 1, -1)) if 0 < b < d]
        legs = [*links[: int(k > 0)], *sites, *links[int(k > 0) :]]
        a = core.reshape([one["dim"] for one in legs])
        turned = order(legs)
        put_tensor(group, f"{kind}[{k + 1}]", a.transpose([legs.index(one) for one in turned]), turned, **how)
    return group
