"""Read HDF5 files of TeNPy without TeNPy.

An object is a group with attributes type, class and module; its parts are groups and data sets with fixed names. A list
is a group with the keys 0, 1, ... and the attribute len; shared Python objects are one object with several names. Type
strings are compared and never imported, and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib._validate import plural
from tnlib_adapters.interop._hdf5 import Node
from tnlib_adapters.interop._tenpy_parts import OPERATOR_LEGS, STATE_LEGS, Form, OperatorParts, StateParts

_HOMES = {"MPS": "tenpy.networks.mps", "MPO": "tenpy.networks.mpo", "Array": "tenpy.linalg.np_conserved"}
_LISTS = ("list", "tuple")
_NUMBERS = ("array", "int", "float", "complex", "bool", *(f"np.{kind}{bits}" for kind, bits in (
    ("int", 32), ("int", 64), ("float", 32), ("float", 64), ("complex", 64), ("complex", 128)
)))  # fmt: skip


def parts_of_file(root: Node, key: str) -> StateParts | OperatorParts:
    """Return the state or operator stored under `key` of an open file."""
    group = root
    for name in filter(None, key.split("/")):
        group = group.child(name)
    kind = _class(group, "MPS", "MPO")
    sites = _items(group.child("sites"))
    labels = STATE_LEGS if kind == "MPS" else OPERATOR_LEGS
    shared: dict[str, Any] = {
        "boundary": _text(group.child("boundary_condition")),
        "grouped": group.integer_attribute("grouped", 1),
        "site_kinds": [site.text_attribute("class", "") for site in sites],
        "perms": [_numbers(site.child("perm")) for site in sites],
        "tensors": [_dense(tensor, labels) for tensor in _items(group.child("tensors"))],
    }
    if kind == "MPS":
        norm = group.attribute("norm")
        if not isinstance(norm, int | float | complex):
            group.refuse("must have a number as its attribute 'norm'", repr(norm))
        return StateParts(
            **shared,
            forms=[_form(form) for form in _items(group.child("canonical_form"))],
            spectra=[_spectrum(s) for s in _items(group.child("singular_values"))],
            norm=norm,
        )
    return OperatorParts(
        **shared,
        begin=_end(group.child("index_identity_left"), 0),
        end=_end(group.child("index_identity_right"), -1),
        plus_hc=bool(group.integer_attribute("explicit_plus_hc", 0)),
    )


def _class(group: Node, *names: str) -> str:
    """Return the class of the object in a group, one of `names`."""
    stored = tuple(group.attribute(key) for key in ("type", "class", "module"))
    name = next((name for name in names if stored == ("instance", name, _HOMES[name])), None)
    if name is None:
        stored_class = stored[1] or stored[0] or "no type at all"
        hint = f", which holds {', '.join(group.names()[:8])}" if stored[0] in ("dict", "simple_dict") else ""
        group.refuse(
            f"must hold {' or '.join(names)} of TeNPy", f"{stored_class}{hint}", "pass name= where the object is"
        )
    return name


def _typed(item: Node, *kinds: str) -> str:
    stored = item.attribute("type")
    if stored not in kinds:
        item.refuse(f"must hold one of the types {', '.join(kinds)}", repr(stored))
    return str(stored)


def _items(group: Node) -> list[Node]:
    """Return the entries of a list in order."""
    _typed(group, *_LISTS)
    count, n_children = group.integer_attribute("len"), len(group.names())
    if count != n_children:
        group.refuse(f"must hold {count} entries", str(n_children))
    return [group.child(str(k)) for k in range(count)]


def _numbers(item: Node) -> Array:
    _typed(item, *_NUMBERS)
    return item.numbers()


def _integers(item: Node, ndim: int) -> Array:
    a = _numbers(item)
    if a.ndim != ndim or a.dtype.kind not in "iu" or not a.size:
        item.refuse(f"must hold integers with {plural(ndim, 'leg')}", f"{a.dtype} of shape {a.shape}")
    return a


def _text(item: Node) -> str:
    _typed(item, "str")
    return item.text()


def _end(group: Node, position: int) -> int | None:
    """Return the first or last entry of a list of integers or None."""
    items = _items(group)
    if not items:
        group.refuse("must have an entry for every bond", "none")
    item = items[position]
    return None if _typed(item, "None", *_NUMBERS) == "None" else item.integer()


def _form(item: Node) -> Form:
    if _typed(item, "None", *_LISTS) == "None":
        return None
    powers = [_numbers(power) for power in _items(item)]
    if len(powers) != 2 or any(p.size != 1 or p.dtype.kind not in "iuf" or not abs(p.item()) <= 1 for p in powers):
        item.refuse("must hold two powers from -1 to 1", str([p.tolist() for p in powers]))
    return float(powers[0].item()), float(powers[1].item())


def _spectrum(item: Node) -> Array | None:
    kind = _typed(item, "None", "array", "instance")
    return None if kind == "None" else _numbers(item) if kind == "array" else _dense(item, None)


def _dense(group: Node, labels: Sequence[str] | None) -> Array:
    """Return an npc Array as a dense array, legs in the order of `labels`; a matrix without them."""
    _class(group, "Array")
    cuts = [_cuts(leg) for leg in _items(group.child("legs"))]
    blocks = [_numbers(block) for block in _items(group.child("blocks"))]
    stored_labels = [_text(label) for label in _items(group.child("labels"))] if labels else []
    if sorted(stored_labels) != sorted(labels or []):
        group.refuse(
            f"must be a tensor with legs {', '.join(labels or [])}",
            ", ".join(stored_labels),
            "only pure states and operators are trains",
        )
    n_legs = len(labels or "12")
    if len(cuts) != n_legs:
        group.refuse(f"must have {n_legs} legs", str(len(cuts)))
    places = _integers(group.child("block_inds"), 2) if blocks else np.zeros((0, n_legs), int)
    if places.shape != (len(blocks), n_legs):
        group.refuse(f"must hold the places of {len(blocks)} blocks on {n_legs} legs", f"shape {places.shape}")
    out = group.zeros([cut[-1] for cut in cuts], np.result_type(*blocks) if blocks else float)
    for block, place in zip(blocks, places.tolist(), strict=True):
        if any(not 0 <= q < len(cut) - 1 for cut, q in zip(cuts, place, strict=True)):
            group.refuse("must hold blocks in places that its legs have", f"one at {place}")
        region = out[tuple(slice(cut[q], cut[q + 1]) for cut, q in zip(cuts, place, strict=True))]
        if region.shape != block.shape:
            group.refuse("must hold blocks that fit its legs", f"one of shape {block.shape} for {region.shape}")
        region[...] = block
    return out.transpose([stored_labels.index(label) for label in labels]) if labels else out


def _cuts(leg: Node) -> list[int]:
    """Return the offsets of the blocks of a leg, and its size."""
    kind = leg.attribute("format")
    if kind == "blocks":
        cuts = _integers(leg.child("slices"), 1)
    elif kind == "compact":
        table = _integers(leg.child("blockcharges"), 2)  # begin, end, charges ...
        if table.shape[1] < 2:
            leg.refuse("must hold begin and end of its blocks", f"a table of shape {table.shape}")
        cuts = np.append(table[:, 0], table[-1, 1])
    else:
        leg.refuse(
            "must be a leg in format blocks or compact, which tell the blocks apart",
            repr(kind),
            "save it again with TeNPy's defaults",
        )
    offsets = [int(cut) for cut in cuts]
    if offsets[0] != 0 or any(stop < start for start, stop in pairwise(offsets)):
        leg.refuse("must hold ascending slices", "others")
    return offsets
