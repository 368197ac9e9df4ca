"""Convert TeNPy states and operators, from objects or files, to tnlib formats.

TeNPy stores in tensor k, by its form (nuL, nuR): S[k]^nuL Gamma[k] S[k+1]^nuR with the Schmidt values S. Neighbours
hold S of their bond to the power nuR + nuL; here the right neighbour is multiplied by the power missing to 1:

    B = (0, 1), right-isometric     A = (1, 0), left-isometric     G = (0, 0), Vidal's Gamma     C = (1/2, 1/2)

A site may sort its basis by charge: entry i of the stored leg is entry perm[i] of the physical basis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib_adapters.interop._cores import find_center

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


def state(name: str, parts: StateParts) -> TensorTrain | Vidal:
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


def operator(name: str, parts: OperatorParts) -> TTMatrix:
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
