"""Read HDF5 files of TeNPy without TeNPy.

An object is a group with attributes type, class and module; its parts are groups and data sets with fixed names. A list
is a group with the keys 0, 1, ... and the attribute len; shared Python objects are one object with several names. Type
strings are compared and never imported, nothing is unpickled, and external links are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.interop._tenpy_parts import OPERATOR_LEGS, STATE_LEGS, Form, OperatorParts, StateParts

_HOMES = {"MPS": "tenpy.networks.mps", "MPO": "tenpy.networks.mpo", "Array": "tenpy.linalg.np_conserved"}
_LISTS = ("list", "tuple")
_NUMBERS = ("array", "int", "float", "complex", "bool", *(f"np.{kind}{bits}" for kind, bits in (
    ("int", 32), ("int", 64), ("float", 32), ("float", 64), ("complex", 64), ("complex", 128)
)))  # fmt: skip


def parts_of_file(opened: Any, key: str) -> StateParts | OperatorParts:
    """Return the state or operator stored under `key` of an open h5py.File."""
    group = opened
    for name in filter(None, key.split("/")):
        group = _child(group, name)
    kind = _class(group, "MPS", "MPO")
    sites = _items(_child(group, "sites"))
    labels = STATE_LEGS if kind == "MPS" else OPERATOR_LEGS
    shared: dict[str, Any] = {
        "boundary": _text(_child(group, "boundary_condition")),
        "grouped": int(group.attrs.get("grouped", 1)),
        "site_kinds": [str(site.attrs.get("class")) for site in sites],
        "perms": [_numbers(_child(site, "perm")) for site in sites],
        "tensors": [_dense(tensor, labels) for tensor in _items(_child(group, "tensors"))],
    }
    if kind == "MPS":
        return StateParts(
            **shared,
            forms=[_form(form) for form in _items(_child(group, "canonical_form"))],
            spectra=[_spectrum(s) for s in _items(_child(group, "singular_values"))],
            norm=complex(group.attrs["norm"]),
        )
    return OperatorParts(
        **shared,
        begin=_index(_items(_child(group, "index_identity_left"))[0]),
        end=_index(_items(_child(group, "index_identity_right"))[-1]),
        plus_hc=bool(group.attrs.get("explicit_plus_hc", False)),
    )


def _child(group: Any, name: str) -> Any:
    """Return the child `name` of a group; links are refused."""
    import h5py

    link = group.get(name, getlink=True) if isinstance(group, h5py.Group) else None
    if link is None:
        raise FileFormatError(
            f"tenpy.read: {group.file.filename} must hold {name!r} in {group.name}, found no such thing; is it "
            "a file of TeNPy, and key what was saved?"
        )
    item = group[name] if isinstance(link, h5py.HardLink) else None
    if item is None or (isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)):
        raise FileFormatError(
            f"tenpy.read: {group.file.filename} must hold {name!r} in {group.name} itself, found a link to "
            "elsewhere; copy what it leads to into the file."
        )
    return item


def _class(group: Any, *names: str) -> str:
    """Return the class of the object in a group, one of `names`."""
    attrs = group.attrs
    for name in names:
        if (attrs.get("type"), attrs.get("class"), attrs.get("module")) == ("instance", name, _HOMES[name]):
            return name
    stored = attrs.get("class") or attrs.get("type") or "no type at all"
    hint = f", which holds {', '.join(list(group)[:8])}" if attrs.get("type") in ("dict", "simple_dict") else ""
    raise FileFormatError(
        f"tenpy.read: {group.file.filename} must hold {' or '.join(names)} of TeNPy in {group.name}, found "
        f"{stored}{hint}; pass name= where the object is."
    )


def _typed(item: Any, *kinds: str) -> str:
    stored = item.attrs.get("type")
    if stored not in kinds:
        raise FileFormatError(
            f"tenpy.read: {item.file.filename} must hold one of the types {', '.join(kinds)} in {item.name}, found "
            f"{stored!r}; it is damaged or of another kind."
        )
    return str(stored)


def _items(group: Any) -> list[Any]:
    """Return the entries of a list in order."""
    _typed(group, *_LISTS)
    count = int(group.attrs["len"])
    if count != len(group):
        raise FileFormatError(
            f"tenpy.read: {group.file.filename} must hold {count} entries in {group.name}, found {len(group)}; "
            "it is damaged."
        )
    return [_child(group, str(k)) for k in range(count)]


def _numbers(item: Any) -> Array:
    _typed(item, *_NUMBERS)
    return np.asarray(item[()])


def _text(item: Any) -> str:
    _typed(item, "str")
    return str(item.asstr()[()])


def _index(item: Any) -> int | None:
    return None if _typed(item, "None", *_NUMBERS) == "None" else int(_numbers(item))


def _form(item: Any) -> Form:
    if _typed(item, "None", *_LISTS) == "None":
        return None
    left, right = map(_numbers, _items(item))
    return float(left), float(right)


def _spectrum(item: Any) -> Array | None:
    kind = _typed(item, "None", "array", "instance")
    return None if kind == "None" else _numbers(item) if kind == "array" else _dense(item, None)


def _dense(group: Any, labels: Sequence[str] | None) -> Array:
    """Return an npc Array as a dense array, legs in the order of `labels`."""
    _class(group, "Array")
    cuts = [_cuts(leg) for leg in _items(_child(group, "legs"))]
    blocks = [_numbers(block) for block in _items(_child(group, "blocks"))]
    places = _numbers(_child(group, "block_inds"))
    out = np.zeros([cut[-1] for cut in cuts], np.result_type(*blocks) if blocks else float)
    for block, place in zip(blocks, places, strict=True):
        region = out[tuple(slice(cut[q], cut[q + 1]) for cut, q in zip(cuts, place, strict=True))]
        if region.shape != block.shape:
            raise FileFormatError(
                f"tenpy.read: {group.file.filename} must hold blocks in {group.name} that fit its legs, found "
                f"one of shape {block.shape} for {region.shape}; it is damaged."
            )
        region[...] = block
    if labels is None:
        return out
    stored_labels = [_text(label) for label in _items(_child(group, "labels"))]
    if sorted(stored_labels) != sorted(labels):
        raise FileFormatError(
            f"tenpy.read: {group.file.filename} must hold tensors with legs {', '.join(labels)}, found "
            f"{', '.join(stored_labels)} in {group.name}; only pure states and operators are trains."
        )
    return out.transpose([stored_labels.index(label) for label in labels])


def _cuts(leg: Any) -> list[int]:
    """Return the offsets of the blocks of a leg, and its size."""
    kind = leg.attrs.get("format")
    if kind == "blocks":
        cuts = _numbers(_child(leg, "slices"))
    elif kind == "compact":
        table = _numbers(_child(leg, "blockcharges"))  # begin, end, charges ...
        cuts = np.append(table[:, 0], table[-1, 1])
    else:
        raise FileFormatError(
            f"tenpy.read: {leg.file.filename} must hold legs in format blocks or compact, found {kind!r} in "
            f"{leg.name}, which does not tell the blocks apart; save it again with TeNPy's defaults."
        )
    if cuts.ndim != 1 or cuts[0] != 0 or (np.diff(cuts) < 0).any():
        raise FileFormatError(
            f"tenpy.read: {leg.file.filename} must hold ascending slices in {leg.name}, found others; it is damaged."
        )
    return [int(cut) for cut in cuts]
