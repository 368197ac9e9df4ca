"""Objects of TeNPy from formats of tnlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib_adapters.interop._cores import with_scale
from tnlib_adapters.interop._sectors import Sectors, by_charge, left_isometric
from tnlib_adapters.interop._tenpy_parts import OPERATOR_LEGS, STATE_LEGS

PACKAGE = "physics-tenpy"
_MIXED = 1e4  # eps: what part of the norm may lie outside of one total charge
_LOG_LARGEST = math.log(np.finfo(float).max)


def build(function: str, value: Any, sites: Any) -> Any:
    """Return the MPS or MPO that `to_tenpy` documents."""
    if not isinstance(value, TensorTrain | TTMatrix | Vidal):
        raise ArgumentTypeError(
            f"{function}: value must be a TensorTrain, a Vidal or a TTMatrix, got a {type(value).__name__}; "
            "pass a train, for example tnlib.tt_svd(x).value."
        )
    if not isinstance(value, TTMatrix):
        return _mps(function, value, _as_sites(function, sites, value.shape))
    if value.row_shape != value.col_shape:
        raise ArgumentError(
            f"{function}: value must have as many rows as columns on every site, got {value.row_shape} and "
            f"{value.col_shape}; TeNPy has one space per site."
        )
    return _mpo(function, value, _as_sites(function, sites, value.row_shape))


def _as_sites(function: str, sites: Any, sizes: Sequence[int]) -> list[Any]:
    """Return one site per core, of the right size and with the same charges as the others."""
    npc = import_optional(function, "tenpy.linalg.np_conserved", PACKAGE)
    site = import_optional(function, "tenpy.networks.site", PACKAGE)
    if sites is None:
        no_charge = npc.ChargeInfo()
        plain = {n: site.Site(npc.LegCharge.from_trivial(n, no_charge)) for n in set(sizes)}
        return [plain[n] for n in sizes]
    found = sites if isinstance(sites, Sequence) else [sites] * len(sizes)
    if not all(isinstance(one, site.Site) for one in found):
        raise ArgumentTypeError(
            f"{function}: sites must be a Site of TeNPy or a list of them, got {sites!r}; pass for example "
            "SpinHalfSite('Sz')."
        )
    if [one.dim for one in found] != list(sizes):
        raise ArgumentError(
            f"{function}: sites must have the sizes {tuple(sizes)} of the legs, got {tuple(one.dim for one in found)}; "
            "pass one site per core."
        )
    if any(one.leg.chinfo != found[0].leg.chinfo or isinstance(one, site.GroupedSite) for one in found):
        raise ArgumentError(
            f"{function}: sites must conserve the same charges and be no grouped ones, got others; call TeNPy's "
            "set_common_charges on them."
        )
    return list(found)


def _mps(function: str, value: TensorTrain | Vidal, sites: Sequence[Any]) -> Any:
    mps = import_optional(function, "tenpy.networks.mps", PACKAGE)
    if isinstance(value, Vidal) and sites[0].leg.chinfo.qnumber == 0:
        cores, spectra = _sorted(value.gammas, sites), [np.ones(1), *value.lambdas, np.ones(1)]
        charges, log_norm, forms = _no_charges(value.ranks), value.log_scale, ["G"] * len(cores)
    else:
        train = value.train() if isinstance(value, Vidal) else value
        center = 0 if isinstance(value, Vidal) else train.center or 0
        legs, valid = [_charges(site) for site in sites], sites[0].leg.chinfo.make_valid
        found, log_norm = _in_sectors(
            function, TensorTrain.from_sweep(_sorted(train.cores, sites), None, train.exponent), legs, valid
        )
        left_isometric(found, legs, valid, center)
        cores, spectra, charges = found.cores, found.spectra, found.charges
        forms = ["A"] * center + ["B"] * (len(cores) - center)
    tensors = [
        _blocks(a, [(left, 1), (site.leg, 0), (right, -1)], STATE_LEGS)
        for a, left, site, right in zip(cores, charges, sites, charges[1:], strict=False)
    ]
    made = mps.MPS(sites, tensors, spectra, form=forms, norm=_as_norm(function, log_norm), unit_cell_width=len(sites))
    if isinstance(value, Vidal):
        made.convert_form("G")
    return made


def _mpo(function: str, value: TTMatrix, sites: Sequence[Any]) -> Any:
    mpo = import_optional(function, "tenpy.networks.mpo", PACKAGE)
    charges = _no_charges(value.ranks)
    if sites[0].leg.chinfo.qnumber:
        value, charges = _operator_in_sectors(function, value, sites)
    cores = with_scale(function, value)
    if charges[0].shape[1] == 0:
        cores = [_sorted([a], [site])[0][:, :, site.perm] for a, site in zip(cores, sites, strict=True)]
    tensors = [
        _blocks(a, [(left, 1), (site.leg, 0), (site.leg.conj(), 0), (right, -1)], OPERATOR_LEGS)
        for a, left, site, right in zip(cores, charges, sites, charges[1:], strict=False)
    ]
    inner = [None] * len(sites)
    return mpo.MPO(sites, tensors, IdL=[0, *inner], IdR=[*inner, 0], mps_unit_cell_width=len(sites))


def _operator_in_sectors(function: str, value: TTMatrix, sites: Sequence[Any]) -> tuple[TTMatrix, list[Array]]:
    """Return the operator in the bases of the sites, on bonds of definite charge, and these charges."""
    pairs = [np.add.outer(site.dim * site.perm, site.perm).reshape(-1) for site in sites]
    moves = [(_charges(site)[:, None] - _charges(site)[None]).reshape(site.dim**2, -1) for site in sites]
    valid = sites[0].leg.chinfo.make_valid
    cores = [a[:, pair] for a, pair in zip(value.fused().cores, pairs, strict=True)]  # l (m n) r
    found, log_norm = _in_sectors(
        function, TensorTrain.from_sweep(cores, None, value.exponent), [valid(move) for move in moves], valid
    )
    split = [a.reshape(len(a), site.dim, site.dim, -1) for a, site in zip(found.cores, sites, strict=True)]
    if log_norm == -math.inf:
        return TTMatrix([0 * split[0], *split[1:]]), found.charges
    return TTMatrix(split, None, log_norm), found.charges


def _in_sectors(
    function: str, train: TensorTrain, legs: Sequence[Array], valid: Callable[[Array], Array]
) -> tuple[Sectors, float]:
    """Return the train on bonds of definite charge, and the logarithm of its norm."""
    found = by_charge(train, legs, valid)
    if found.outside > _MIXED * np.finfo(train.dtype).eps:
        raise ArgumentError(
            f"{function}: value must have one total charge where sites conserve it, got {found.outside:.1e} of its "
            "norm with another; pass sites without that charge, or project first."
        )
    return found, math.log(found.size) + found.exponent * math.log(2) if found.size else -math.inf


def _as_norm(function: str, log_norm: float) -> float:
    norm = math.exp(log_norm) if log_norm < _LOG_LARGEST else math.inf
    if log_norm > -math.inf and not 0.0 < norm < math.inf:
        raise ArgumentError(
            f"{function}: value must have a norm within float64, got exp({log_norm:.1f}); TeNPy keeps no logarithm, "
            "divide value by its norm first."
        )
    return norm


def _blocks(a: Array, legs: Sequence[tuple[Any, int]], labels: Sequence[str]) -> Any:
    """Return `a` as an Array of TeNPy; a leg is one, or (with a sign) the charges of a bond."""
    npc = import_optional("to_tenpy", "tenpy.linalg.np_conserved", PACKAGE)
    chinfo = next(leg.chinfo for leg, sign in legs if not sign)
    known = [npc.LegCharge.from_qflat(chinfo, leg, sign).bunch()[1] if sign else leg for leg, sign in legs]
    return npc.Array.from_ndarray(a, known, a.dtype, chinfo.make_valid(), labels=list(labels))


def _sorted(cores: Sequence[Array], sites: Sequence[Any]) -> list[Array]:
    """Return cores (l, n, ...) with n in the order of the sites."""
    return [a[:, site.perm] for a, site in zip(cores, sites, strict=True)]


def _charges(site: Any) -> Array:
    """Return the charges of the states of a site in its own order, (n, number of charges)."""
    return np.asarray(site.leg.to_qflat() * site.leg.qconj)


def _no_charges(ranks: Sequence[int]) -> list[Array]:
    return [np.zeros((r, 0), int) for r in ranks]
