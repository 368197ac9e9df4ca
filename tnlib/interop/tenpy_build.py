"""Build TeNPy MPS and MPO objects, on bonds of definite charge where the sites conserve charges.

If every leg k carries charges and the state has one total charge, states on the left of a bond with different charges
meet orthogonal states on its right, so the Schmidt decomposition splits by charge. A decomposition that ignores charges
may mix them within a group of equal Schmidt values, which block-sparse tensors cannot represent. Without charges there
is one sector, and the sweeps are those of ordinary rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.tt_rounding import right_canonicalize
from tnlib.formats.train.vidal import Vidal
from tnlib.interop.core_arrays import with_scale
from tnlib.interop.tenpy_parts import OPERATOR_LEGS, STATE_LEGS
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scaling import norm
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.truncation import noise_level

PACKAGE = "physics-tenpy"
_MIXED = 1e4  # eps: largest relative norm outside of one total charge
_LOG_LARGEST = math.log(np.finfo(float).max)


def build(function: str, value: Any, sites: Any, rtol: float | None) -> Any:
    """Return the MPS or MPO of `to_tenpy`."""
    site_list = _checked_sites(function, value, sites)
    if isinstance(value, TTMatrix):
        return _mpo(function, value, site_list, rtol)
    return _mps(function, value, site_list, rtol)


def project_value(function: str, value: Any, sites: Any) -> tuple[TensorTrain | TTMatrix, float]:
    """Return the part of a train with its most common total charge, and the relative norm of the rest."""
    site_list = _checked_sites(function, value, sites)
    train = value.train() if isinstance(value, Vidal) else value
    sectors = _sectors_of(train, site_list)
    cores = [a[:, np.argsort(order)] for a, order in zip(sectors.cores, _orders(train, site_list), strict=True)]
    scaled = TensorTrain.from_sweep([sectors.size * cores[0], *cores[1:]], 0, sectors.exponent)
    return train.unfused(scaled.folded()), sectors.outside


def _checked_sites(function: str, value: Any, sites: Any) -> list[Any]:
    """Return one site per core of `value`, both validated: matching sizes, equal charges."""
    if not isinstance(value, TensorTrain | TTMatrix | Vidal):
        raise ArgumentTypeError(
            f"{function}: value must be a TensorTrain, a Vidal or a TTMatrix, got a {type(value).__name__}; "
            "pass a train, for example tnlib.tt_svd(x).value."
        )
    sizes = value.row_shape if isinstance(value, TTMatrix) else value.shape
    if isinstance(value, TTMatrix) and sizes != value.col_shape:
        raise ArgumentError(
            f"{function}: value must have as many rows as columns on every site, got {sizes} and {value.col_shape}; "
            "TeNPy has one space per site."
        )
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
            f"{function}: sites must have the sizes {sizes} of the legs, got "
            f"{tuple(entry.dim for entry in site_list)}; pass one site per core."
        )
    if any(entry.leg.chinfo != site_list[0].leg.chinfo or isinstance(entry, site.GroupedSite) for entry in site_list):
        raise ArgumentError(
            f"{function}: sites must conserve the same charges and must not be grouped, got others; call TeNPy's "
            "set_common_charges on them."
        )
    return list(site_list)


def _mps(function: str, value: TensorTrain | Vidal, sites: Sequence[Any], rtol: float | None) -> Any:
    mps = import_optional(function, "tenpy.networks.mps", PACKAGE)
    if isinstance(value, Vidal) and sites[0].leg.chinfo.qnumber == 0:
        cores = [a[:, site.perm] for a, site in zip(value.gammas, sites, strict=True)]
        spectra = [np.ones(1), *value.lambdas, np.ones(1)]
        charges, log_norm, forms = _no_charges(value.ranks), value.log_scale, ["G"] * len(cores)
    else:
        train = value.train() if isinstance(value, Vidal) else value
        center = 0 if isinstance(value, Vidal) else train.center or 0
        sectors, log_norm = _in_sectors(function, train, sites, rtol)
        left_isometric(sectors, *_leg_charges(train, sites), center)
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


def _mpo(function: str, value: TTMatrix, sites: Sequence[Any], rtol: float | None) -> Any:
    mpo = import_optional(function, "tenpy.networks.mpo", PACKAGE)
    charges = _no_charges(value.ranks)
    if sites[0].leg.chinfo.qnumber:
        sectors, log_norm = _in_sectors(function, value, sites, rtol)
        split = [a.reshape(len(a), site.dim, site.dim, -1) for a, site in zip(sectors.cores, sites, strict=True)]
        is_zero = log_norm == -math.inf
        value = TTMatrix([0 * split[0], *split[1:]] if is_zero else split, None, 0.0 if is_zero else log_norm)
        charges = sectors.charges
    cores = with_scale(function, value)
    if charges[0].shape[1] == 0:
        cores = [a[:, site.perm][:, :, site.perm] for a, site in zip(cores, sites, strict=True)]
    tensors = [
        _blocks(a, [(left, 1), (site.leg, 0), (site.leg.conj(), 0), (right, -1)], OPERATOR_LEGS)
        for a, left, site, right in zip(cores, charges, sites, charges[1:], strict=False)
    ]
    inner = [None] * len(sites)
    return mpo.MPO(sites, tensors, IdL=[0, *inner], IdR=[*inner, 0], mps_unit_cell_width=len(sites))


def _in_sectors(
    function: str, value: TensorTrain | TTMatrix, sites: Sequence[Any], rtol: float | None
) -> tuple[Sectors, float]:
    """Return the train in the bases of the sites on bonds of definite charge, and the logarithm of its norm."""
    sectors = _sectors_of(value, sites)
    if sectors.outside > (rtol or 0.0) + _MIXED * np.finfo(value.dtype).eps:
        raise ArgumentError(
            f"{function}: value must have one total charge where sites conserve it, got {sectors.outside:.1e} of its "
            f"norm with another; pass rtol={1.1 * sectors.outside:.1e} to omit it, project_charge of it, or sites "
            "without that charge; round and apply with degeneracy_tol=1e-3 keep it."
        )
    return sectors, math.log(sectors.size) + sectors.exponent * math.log(2) if sectors.size else -math.inf


def _sectors_of(value: TensorTrain | TTMatrix, sites: Sequence[Any]) -> Sectors:
    """Return a train, fused if it is an operator, with its legs in the order of the sites."""
    cores = [a[:, order] for a, order in zip(value.fused().cores, _orders(value, sites), strict=True)]  # l n r
    return by_charge(TensorTrain.from_sweep(cores, None, value.exponent), *_leg_charges(value, sites))


def _orders(value: TensorTrain | TTMatrix, sites: Sequence[Any]) -> list[Array]:
    """Return the position of every entry of the legs of the sites in physical order; of operators, of pairs."""
    if isinstance(value, TTMatrix):
        return [np.add.outer(site.dim * site.perm, site.perm).reshape(-1) for site in sites]
    return [site.perm for site in sites]


def _leg_charges(value: TensorTrain | TTMatrix, sites: Sequence[Any]) -> tuple[list[Array], Callable[[Array], Array]]:
    """Return the charges (n, number of charges) of the entries of every leg, of pairs for operators, and `valid`."""
    charges = [np.asarray(site.leg.to_qflat() * site.leg.qconj) for site in sites]
    valid = sites[0].leg.chinfo.make_valid
    if isinstance(value, TTMatrix):
        return [valid((charge[:, None] - charge[None]).reshape(len(charge) ** 2, -1)) for charge in charges], valid
    return charges, valid


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


def _no_charges(ranks: Sequence[int]) -> list[Array]:
    return [np.zeros((r, 0), int) for r in ranks]


@dataclass
class Sectors:
    """2**exponent * size times a train of norm 1 with right-isometric cores; bond charges belong to the left."""

    cores: list[Array]
    spectra: list[Array]  # of all d + 1 bonds, descending within a charge
    charges: list[Array]  # of all d + 1 bonds, (r, number of charges)
    size: float
    exponent: int
    outside: float  # norm of the omitted part, whose total charge is not the most common one


def by_charge(train: TensorTrain, legs: Sequence[Array], valid: Callable[[Array], Array]) -> Sectors:
    """Return the train in bases of definite charge, with numerical ranks; for zero, a basis state and size 0.

    `legs[k]` (n[k], number of charges) holds the charges of the entries of leg k; `valid` maps charges into their
    range. The sweep from left to right assigns a charge to every bond state; the last core determines the total charge.
    Parts with another total charge are omitted there, and from the other cores in the sweep from right to left.
    """
    gathered = right_canonicalize(train)
    train_cores, dtype, size = list(gathered.cores), train.dtype, norm(gathered.cores[0])
    if size == 0.0:
        train_cores = [np.eye(1, n, dtype=dtype)[..., None] for n in train.shape]
    noise = [noise_level(1.0, dtype, max(core.shape[-1], len(legs))) for core in train_cores]
    last = train_cores[0] / train_cores[0].real.dtype.type(size or 1.0)
    labelled, charges = [], [valid(np.zeros((1, legs[0].shape[1]), int))]
    for k, following in enumerate(train_cores[1:]):
        left, n, right = last.shape
        u, _, carry, ends = _split(last.reshape(left * n, right), _after(charges[k], legs[k], valid), noise[k])
        labelled.append(u.reshape(left, n, -1))
        charges.append(ends)
        last = (carry @ following.reshape(right, -1)).reshape(len(carry), *following.shape[1:])  # r' [r] n r''
    last, total, outside = _of_one_charge(last, _after(charges[-1], legs[-1], valid))
    inside, unit = norm(last), np.ones(1, last.real.dtype)
    sectors = Sectors([last / last.real.dtype.type(inside)], [unit], [total], size * inside, gathered.exponent, outside)
    for k in range(len(legs) - 1, 0, -1):
        left, n, right = sectors.cores[0].shape
        rows = _before(sectors.charges[0], legs[k], valid)
        u, s, carry, begins = _split(sectors.cores[0].reshape(left, n * right).T, rows, noise[k - 1], charges[k])
        sectors.cores[0] = np.ascontiguousarray(u.T).reshape(-1, n, right)
        sectors.cores.insert(0, labelled[k - 1] @ carry.T)  # l n [r] r'
        sectors.spectra.insert(0, s)
        sectors.charges.insert(0, begins)
    sectors.spectra.insert(0, unit)
    sectors.charges.insert(0, charges[0])
    return sectors


def left_isometric(found: Sectors, legs: Sequence[Array], valid: Callable[[Array], Array], center: int) -> None:
    """Make the cores before number `center` left-isometric in the same bases.

    The columns of diag(left values) @ core are orthogonal, with the right values as norms. Division by these would
    amplify roundoff in the smallest ones; a QR that starts with the longest columns does not.
    """
    for k in range(center):
        left, n, right = found.cores[k].shape
        theta = (found.spectra[k][:, None, None] * found.cores[k]).reshape(left * n, right)
        begins, out, values_kept = _after(found.charges[k], legs[k], valid), np.zeros_like(theta), []
        for columns in _alike(found.charges[k + 1]):
            rows = np.flatnonzero((begins == found.charges[k + 1][columns[0]]).all(axis=1))
            q, _ = qr_positive(theta[np.ix_(rows, columns)])
            columns = columns[: q.shape[1]]  # values beyond the size of this sector are roundoff
            out[np.ix_(rows, columns)] = q
            values_kept.append(columns)
        keep = np.sort(np.concatenate(values_kept))
        found.cores[k], found.cores[k + 1] = out[:, keep].reshape(left, n, -1), found.cores[k + 1][keep]
        found.spectra[k + 1], found.charges[k + 1] = found.spectra[k + 1][keep], found.charges[k + 1][keep]


def _after(charges: Array, leg: Array, valid: Callable[[Array], Array]) -> Array:
    """Return the charges after a core, of rows (l n), from those before it."""
    return valid((charges[:, None] + leg[None]).reshape(len(charges) * len(leg), -1))


def _before(charges: Array, leg: Array, valid: Callable[[Array], Array]) -> Array:
    """Return the charges before a core, of columns (n r), from those after it."""
    return valid((charges[None] - leg[:, None]).reshape(len(leg) * len(charges), -1))


def _of_one_charge(core: Array, rows: Array) -> tuple[Array, Array, float]:
    """Return the part of the last core with the most common total charge, that charge, and the norm of the rest."""
    matrix = core.reshape(-1, 1)
    inside = max(_alike(rows), key=lambda sector: norm(matrix[sector]))
    out = np.zeros_like(matrix)
    out[inside] = matrix[inside]
    return out.reshape(core.shape), rows[inside[:1]], norm(np.delete(matrix, inside, axis=0))


def _split(matrix: Array, rows: Array, noise: float, columns: Array | None = None) -> tuple[Array, Array, Array, Array]:
    """Return u, s and diag(s) vh of a matrix with row charges, and the charges of the columns of u.

    With charges of the columns too, entries outside their sectors are 0 also in vh, where an SVD leaves roundoff, which
    TeNPy refuses above 1e-16.
    """
    parts = []
    for inside in _alike(rows):
        u, s, vh = thin_svd(matrix[inside])
        if columns is not None:
            vh[:, (columns != rows[inside[0]]).any(axis=1)] = 0
        rank = int(np.count_nonzero(s > noise))
        turn = canonical_basis_change(u[:, :rank], s[:rank], matrix.dtype)
        parts.append((inside, turn.columns(u[:, :rank]), s[:rank], turn.rows(s[:rank, None] * vh[:rank])))
    values = np.concatenate([s for _, _, s, _ in parts])
    out, first = np.zeros((len(matrix), len(values)), matrix.dtype), 0
    for inside, u, s, _ in parts:
        out[inside, first : first + len(s)] = u
        first += len(s)
    charges = np.concatenate([np.repeat(rows[inside[:1]], len(s), axis=0) for inside, _, s, _ in parts])
    return out, values, np.concatenate([carry for *_, carry in parts]), charges


def _alike(charges: Array) -> list[Array]:
    """Return the row numbers of every charge, sorted by charge."""
    if charges.shape[1] == 0:
        return [np.arange(len(charges))]
    numbers = np.unique(charges[:, ::-1], axis=0, return_inverse=True)[1].reshape(-1)  # last charge first, as in TeNPy
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
