"""Build TeNPy MPS and MPO objects from tnlib formats."""

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
_MIXED = 1e4  # eps: largest relative norm outside of one total charge
_LOG_LARGEST = math.log(np.finfo(float).max)


def build(function: str, value: Any, sites: Any) -> Any:
    """Return the MPS or MPO of `to_tenpy`."""
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
    """Return one site per core, validated: matching sizes, equal charges."""
    npc = import_optional(function, "tenpy.linalg.np_conserved", PACKAGE)
    site = import_optional(function, "tenpy.networks.site", PACKAGE)
    if sites is None:
        no_charge = npc.ChargeInfo()
        plain = {n: site.Site(npc.LegCharge.from_trivial(n, no_charge)) for n in set(sizes)}
        return [plain[n] for n in sizes]
    site_list = sites if isinstance(sites, Sequence) else [sites] * len(sizes)
    if not all(isinstance(entry, site.Site) for entry in site_list):
        raise ArgumentTypeError(
            f"{function}: sites must be a Site of TeNPy or a list of them, got {sites!r}; pass for example "
            "SpinHalfSite('Sz')."
        )
    if [entry.dim for entry in site_list] != list(sizes):
        raise ArgumentError(
            f"{function}: sites must have the sizes {tuple(sizes)} of the legs, got "
            f"{tuple(entry.dim for entry in site_list)}; pass one site per core."
        )
    if any(entry.leg.chinfo != site_list[0].leg.chinfo or isinstance(entry, site.GroupedSite) for entry in site_list):
        raise ArgumentError(
            f"{function}: sites must conserve the same charges and must not be grouped, got others; call TeNPy's "
            "set_common_charges on them."
        )
    return list(site_list)


def _mps(function: str, value: TensorTrain | Vidal, sites: Sequence[Any]) -> Any:
    mps = import_optional(function, "tenpy.networks.mps", PACKAGE)
    if isinstance(value, Vidal) and sites[0].leg.chinfo.qnumber == 0:
        cores, spectra = _sorted(value.gammas, sites), [np.ones(1), *value.lambdas, np.ones(1)]
        charges, log_norm, forms = _no_charges(value.ranks), value.log_scale, ["G"] * len(cores)
    else:
        train = value.train() if isinstance(value, Vidal) else value
        center = 0 if isinstance(value, Vidal) else train.center or 0
        legs, valid = [_charges(site) for site in sites], sites[0].leg.chinfo.make_valid
        sectors, log_norm = _in_sectors(
            function, TensorTrain.from_sweep(_sorted(train.cores, sites), None, train.exponent), legs, valid
        )
        left_isometric(sectors, legs, valid, center)
        cores, spectra, charges = sectors.cores, sectors.spectra, sectors.charges
        forms = ["A"] * center + ["B"] * (len(cores) - center)
    tensors = [
        _blocks(a, [(left, 1), (site.leg, 0), (right, -1)], STATE_LEGS)
        for a, left, site, right in zip(cores, charges, sites, charges[1:], strict=False)
    ]
    state = mps.MPS(sites, tensors, spectra, form=forms, norm=_as_norm(function, log_norm), unit_cell_width=len(sites))
    if isinstance(value, Vidal):
        state.convert_form("G")
    return state


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
    """Return the operator in the bases of the sites on bonds of definite charge, and the bond charges."""
    pairs = [np.add.outer(site.dim * site.perm, site.perm).reshape(-1) for site in sites]
    moves = [(_charges(site)[:, None] - _charges(site)[None]).reshape(site.dim**2, -1) for site in sites]
    valid = sites[0].leg.chinfo.make_valid
    cores = [a[:, pair] for a, pair in zip(value.fused().cores, pairs, strict=True)]  # l (m n) r
    sectors, log_norm = _in_sectors(
        function, TensorTrain.from_sweep(cores, None, value.exponent), [valid(move) for move in moves], valid
    )
    split = [a.reshape(len(a), site.dim, site.dim, -1) for a, site in zip(sectors.cores, sites, strict=True)]
    if log_norm == -math.inf:
        return TTMatrix([0 * split[0], *split[1:]]), sectors.charges
    return TTMatrix(split, None, log_norm), sectors.charges


def _in_sectors(
    function: str, train: TensorTrain, legs: Sequence[Array], valid: Callable[[Array], Array]
) -> tuple[Sectors, float]:
    """Return the train on bonds of definite charge, and the logarithm of its norm."""
    sectors = by_charge(train, legs, valid)
    if sectors.outside > _MIXED * np.finfo(train.dtype).eps:
        raise ArgumentError(
            f"{function}: value must have one total charge where sites conserve it, got {sectors.outside:.1e} of its "
            "norm with another; pass sites without that charge, or project first."
        )
    return sectors, math.log(sectors.size) + sectors.exponent * math.log(2) if sectors.size else -math.inf


def _as_norm(function: str, log_norm: float) -> float:
    norm = math.exp(log_norm) if log_norm < _LOG_LARGEST else math.inf
    if log_norm > -math.inf and not 0.0 < norm < math.inf:
        raise ArgumentError(
            f"{function}: value must have a norm within float64, got exp({log_norm:.1f}); TeNPy keeps no logarithm, "
            "divide value by its norm first."
        )
    return norm


def _blocks(a: Array, legs: Sequence[tuple[Any, int]], labels: Sequence[str]) -> Any:
    """Return `a` as an npc Array; a leg is a LegCharge, or (with a sign) the charges of a bond."""
    npc = import_optional("to_tenpy", "tenpy.linalg.np_conserved", PACKAGE)
    chinfo = next(leg.chinfo for leg, sign in legs if not sign)
    charges = [npc.LegCharge.from_qflat(chinfo, leg, sign).bunch()[1] if sign else leg for leg, sign in legs]
    return npc.Array.from_ndarray(a, charges, a.dtype, chinfo.make_valid(), labels=list(labels))


def _sorted(cores: Sequence[Array], sites: Sequence[Any]) -> list[Array]:
    """Return cores (l, n, ...) with n permuted to the order of the sites."""
    return [a[:, site.perm] for a, site in zip(cores, sites, strict=True)]


def _charges(site: Any) -> Array:
    """Return the charges of the states of a site in physical order, (n, number of charges)."""
    return np.asarray(site.leg.to_qflat() * site.leg.qconj)


def _no_charges(ranks: Sequence[int]) -> list[Array]:
    return [np.zeros((r, 0), int) for r in ranks]
