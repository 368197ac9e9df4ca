"""TeNPy states and operators, from objects or HDF5 files, as tnlib formats; files are read without TeNPy.

TeNPy stores in tensor k, by its form (nuL, nuR): S[k]^nuL Gamma[k] S[k+1]^nuR with the Schmidt values S. Neighbours
hold S of their bond to the power nuR + nuL; here the right neighbour is multiplied by the power missing to 1:

    B = (0, 1), right-isometric     A = (1, 0), left-isometric     G = (0, 0), Vidal's Gamma     C = (1/2, 1/2)

A site may sort its basis by charge: entry i of the stored leg is entry perm[i] of the physical basis.

In a file, an object is a group with attributes type, class and module; its parts are groups and data sets with fixed
names. A list is a group with the keys 0, 1, ... and the attribute len; a shared Python object has several names. Type
strings are compared and never imported, and nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, plural
from tnlib.formats.train.cores import find_center
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib.interop.safe_hdf5 import HDF5Item

STATE_LEGS = ["vL", "p", "vR"]
OPERATOR_LEGS = ["wL", "p", "p*", "wR"]  # p is the row

Form = tuple[float, float] | None


@dataclass(frozen=True)
class Parts:
    """Stored attributes that states and operators share."""

    boundary: str
    grouped: int
    site_kinds: Sequence[str]  # class names
    perms: Sequence[Array]
    tensors: Sequence[Array]


@dataclass(frozen=True)
class StateParts(Parts):
    """Tensors (vL, p, vR), forms, values on all d + 1 bonds (matrices while a mixer is active), and the norm."""

    forms: Sequence[Form]
    spectra: Sequence[Array | None]
    norm: complex


@dataclass(frozen=True)
class OperatorParts(Parts):
    """Tensors (wL, p, p*, wR), indices of the outer bonds (IdL, IdR), and the flag explicit_plus_hc."""

    begin: int | None
    end: int | None
    plus_hc: bool


def state_of(name: str, parts: StateParts) -> TensorTrain | Vidal:
    """Return the state as a train or Vidal form; `name` is the prefix of error messages."""
    cores = [
        core[:, order] for core, order in _checked(name, parts, len(parts.forms), len(parts.spectra) - 1)
    ]  # vL p vR
    norm = complex(parts.norm)
    size = math.hypot(norm.real, norm.imag)  # abs(norm) raises where it overflows
    if not math.isfinite(size):
        raise ArgumentError(f"{name} must have a finite norm, got {norm}; set it first.")
    phase, log_scale = (norm / size, math.log(size)) if norm else (0.0, 0.0)
    if all(form == (0.0, 0.0) for form in parts.forms) and phase:
        return _as_vidal(name, cores, parts.spectra, phase, log_scale)
    for k in range(1, len(cores)):
        power = _missing_power(name, k, parts.forms[k - 1], parts.forms[k])
        if power != 0.0:
            s = _values(name, k, parts.spectra[k], cores[k])
            with np.errstate(over="ignore", invalid="ignore"):  # TensorTrain refuses what is not finite
                cores[k] = (s**power)[:, None, None] * cores[k]
    center = find_center(cores)
    if phase != 1.0:
        cores = _times(cores, center or 0, phase)
    return TensorTrain(tuple(cores), center, log_scale)


def operator_of(name: str, parts: OperatorParts) -> TTMatrix:
    """Return the operator as a TT-matrix; `name` is the prefix of error messages."""
    cores = [core[:, order][:, :, order] for core, order in _checked(name, parts)]  # wL p p* wR
    cores[0] = cores[0][[_end(name, "IdL of the first", parts.begin, cores[0].shape[0])]]
    cores[-1] = cores[-1][..., [_end(name, "IdR of the last", parts.end, cores[-1].shape[-1])]]
    value = TTMatrix(tuple(cores), find_center(cores))
    return value + value.H if parts.plus_hc else value


def _checked(name: str, parts: Parts, *counts: int) -> list[tuple[Array, Array]]:
    """Return every tensor and the permutation to the physical basis, in one dtype: TeNPy may mix precisions."""
    if parts.boundary != "finite":
        raise ArgumentError(
            f"{name} must have finite boundary conditions, got {parts.boundary!r}; a train has two ends of size 1, cut "
            "a finite chain out first."
        )
    if parts.grouped != 1 or "GroupedSite" in parts.site_kinds:
        raise ArgumentError(
            f"{name} must have its sites one by one, got grouped ones, whose basis TeNPy sorts without a record; call "
            "group_split() first."
        )
    function, _, place = name.partition(": ")
    tensors = [as_array(function, f"in {place}, tensor {k}", a) for k, a in enumerate(parts.tensors)]
    if {len(parts.perms), *counts} != {len(tensors)} or any(
        not np.array_equal(np.sort(perm), np.arange(a.shape[1])) for perm, a in zip(parts.perms, tensors, strict=False)
    ):
        raise ArgumentError(
            f"{name} must have a site, a form and a permutation of its entries for each of {len(tensors)} tensors, got "
            "others; it is damaged."
        )
    dtype = np.result_type(*tensors)
    return [(np.array(a, dtype, order="C"), np.argsort(perm)) for a, perm in zip(tensors, parts.perms, strict=True)]


def _missing_power(name: str, k: int, left: Form, right: Form) -> float:
    """Return the power of S of bond k that is missing in its neighbours."""
    if left is None and right is None:
        return 0.0  # no canonical form: the state is the product of the tensors
    if left is None or right is None:
        raise ArgumentError(
            f"{name} must have a form on both sides of bond {k}, got {left} and {right}; call canonical_form() first."
        )
    return 1.0 - left[1] - right[0]


def _values(name: str, k: int, s: Array | None, core: Array) -> Array:
    """Return the singular values of the bond on the left of tensor k."""
    if s is None or s.ndim != 1 or not (s > 0).all():
        problem = "none" if s is None else "a matrix" if s.ndim == 2 else "zeros among them"
        raise ArgumentError(
            f"{name} must have positive singular values on bond {k}, got {problem}; call canonical_form() first."
        )
    if len(s) != len(core):
        raise ArgumentError(f"{name} must have {len(core)} singular values on bond {k}, got {len(s)}; it is damaged.")
    return s.astype(core.real.dtype, copy=False)


def _as_vidal(
    name: str, gammas: list[Array], spectra: Sequence[Array | None], phase: complex, log_scale: float
) -> Vidal:
    """Return the Vidal form with descending values: TeNPy sorts them by charge."""
    lambdas = [_values(name, k, spectra[k], gammas[k]) for k in range(1, len(gammas))]
    if any(left.shape[-1] != len(right) for left, right in pairwise(gammas)):
        raise ArgumentError(f"{name} must have one size on both sides of every bond, got others; it is damaged.")
    for k, s in enumerate(lambdas):
        order = np.argsort(-s, kind="stable")
        lambdas[k], gammas[k], gammas[k + 1] = s[order], gammas[k][..., order], gammas[k + 1][order]
    return Vidal(tuple(gammas if phase == 1.0 else _times(gammas, 0, phase)), tuple(lambdas), log_scale)


def _times(cores: list[Array], k: int, phase: complex) -> list[Array]:
    factor = phase if complex(phase).imag else complex(phase).real
    dtype = np.result_type(cores[k].dtype, np.complex64) if isinstance(factor, complex) else cores[k].dtype
    return [(factor * core if j == k else core).astype(dtype, copy=False) for j, core in enumerate(cores)]


def _end(name: str, what: str, index: int | None, size: int) -> int:
    """Return the index of an outer bond; segments of infinite operators have outer bonds larger than 1."""
    if index is None and size == 1:
        return 0
    if index is None or not -size <= index < size:
        raise ArgumentError(
            f"{name} must say where its outer bonds begin and end, got {index} for {what} of its bonds, of size "
            f"{size}; set it first."
        )
    return index


_HOMES = {"MPS": "tenpy.networks.mps", "MPO": "tenpy.networks.mpo", "Array": "tenpy.linalg.np_conserved"}
_LISTS = ("list", "tuple")
_NUMBERS = ("array", "int", "float", "complex", "bool", *(f"np.{kind}{bits}" for kind, bits in (
    ("int", 32), ("int", 64), ("float", 32), ("float", 64), ("complex", 64), ("complex", 128)
)))  # fmt: skip


def parts_of_file(root: HDF5Item, key: str) -> StateParts | OperatorParts:
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
        begin=_stored_end(group.child("index_identity_left"), 0),
        end=_stored_end(group.child("index_identity_right"), -1),
        plus_hc=bool(group.integer_attribute("explicit_plus_hc", 0)),
    )


def _class(group: HDF5Item, *names: str) -> str:
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


def _typed(item: HDF5Item, *kinds: str) -> str:
    stored = item.attribute("type")
    if stored not in kinds:
        item.refuse(f"must hold one of the types {', '.join(kinds)}", repr(stored))
    return str(stored)


def _items(group: HDF5Item) -> list[HDF5Item]:
    """Return the entries of a list in order."""
    _typed(group, *_LISTS)
    count, n_children = group.integer_attribute("len"), len(group.names())
    if count != n_children:
        group.refuse(f"must hold {count} entries", str(n_children))
    return [group.child(str(k)) for k in range(count)]


def _numbers(item: HDF5Item) -> Array:
    _typed(item, *_NUMBERS)
    return item.numbers()


def _integers(item: HDF5Item, ndim: int) -> Array:
    a = _numbers(item)
    if a.ndim != ndim or a.dtype.kind not in "iu" or not a.size:
        item.refuse(f"must hold integers with {plural(ndim, 'leg')}", f"{a.dtype} of shape {a.shape}")
    return a


def _text(item: HDF5Item) -> str:
    _typed(item, "str")
    return item.text()


def _stored_end(group: HDF5Item, position: int) -> int | None:
    """Return the first or last entry of a list of integers or None."""
    items = _items(group)
    if not items:
        group.refuse("must have an entry for every bond", "none")
    item = items[position]
    return None if _typed(item, "None", *_NUMBERS) == "None" else item.integer()


def _form(item: HDF5Item) -> Form:
    if _typed(item, "None", *_LISTS) == "None":
        return None
    powers = [_numbers(power) for power in _items(item)]
    if len(powers) != 2 or any(p.size != 1 or p.dtype.kind not in "iuf" or not abs(p.item()) <= 1 for p in powers):
        item.refuse("must hold two powers from -1 to 1", str([p.tolist() for p in powers]))
    return float(powers[0].item()), float(powers[1].item())


def _spectrum(item: HDF5Item) -> Array | None:
    """Return the values on a bond; a matrix stays unread, because no state is made of it."""
    kind = _typed(item, "None", "array", "instance")
    return None if kind == "None" else _numbers(item) if kind == "array" else np.empty((0, 0))


def _dense(group: HDF5Item, labels: Sequence[str]) -> Array:
    """Return an npc Array as a dense array, legs in the order of `labels`."""
    _class(group, "Array")
    cuts = [_cuts(leg) for leg in _items(group.child("legs"))]
    blocks = [_numbers(block) for block in _items(group.child("blocks"))]
    stored_labels = [_text(label) for label in _items(group.child("labels"))]
    if sorted(stored_labels) != sorted(labels):
        group.refuse(
            f"must be a tensor with legs {', '.join(labels)}",
            ", ".join(stored_labels),
            "only pure states and operators are trains",
        )
    n_legs = len(labels)
    if len(cuts) != n_legs:
        group.refuse(f"must have {n_legs} legs", str(len(cuts)))
    positions = _integers(group.child("block_inds"), 2) if blocks else np.zeros((0, n_legs), int)
    if positions.shape != (len(blocks), n_legs):
        group.refuse(f"must hold the positions of {len(blocks)} blocks on {n_legs} legs", f"shape {positions.shape}")
    shape, dtype = [cut[-1] for cut in cuts], np.result_type(*blocks) if blocks else np.dtype(float)
    group.check_dense(shape, dtype)
    out = np.zeros(shape, dtype)
    for block, position in zip(blocks, positions.tolist(), strict=True):
        if any(not 0 <= q < len(cut) - 1 for cut, q in zip(cuts, position, strict=True)):
            group.refuse("must hold blocks at positions that its legs have", f"one at {position}")
        region = out[tuple(slice(cut[q], cut[q + 1]) for cut, q in zip(cuts, position, strict=True))]
        if region.shape != block.shape:
            group.refuse("must hold blocks that fit its legs", f"one of shape {block.shape} for {region.shape}")
        region[...] = block
    return out.transpose([stored_labels.index(label) for label in labels])


def _cuts(leg: HDF5Item) -> list[int]:
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
