"""Convert finite matrix product states and operators to and from TeNPy objects and HDF5 files.

TeNPy stores Schmidt values and a form with its tensors, the norm separately, and blocks of definite charge; with
conserved charges it sorts the local basis. Here every leg is in physical order: `operator` returns a site's operator in
it. Other site data are dropped. Fermion amplitudes refer to the ordered Fock basis: `tnlib.correlation` needs the
Jordan-Wigner string, `operator(site, "JW")`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError, FileFormatError
from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_rtol, import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib.interop.core_arrays import wrong_object
from tnlib.interop.safe_hdf5 import open_hdf5, write_hdf5
from tnlib.interop.tenpy_build import PACKAGE, build, project_value
from tnlib.interop.tenpy_parts import (
    OPERATOR_LEGS,
    STATE_LEGS,
    OperatorParts,
    StateParts,
    operator_of,
    parts_of_file,
    state_of,
)
from tnlib.linalg.threads import single_threaded_blas


def from_tenpy(obj: Any) -> TensorTrain | Vidal | TTMatrix:
    """Return a finite MPS or MPO of TeNPy as a train.

    Parameters
    ----------
    obj
        A tenpy.networks.mps.MPS or tenpy.networks.mpo.MPO with finite boundary conditions, any form and charges.
        Physical dimensions may differ between sites.

    Returns
    -------
    TensorTrain | Vidal | TTMatrix
        Dense cores of a common dtype, legs in the order of the sites without charges. `norm` becomes `log_scale`; its
        phase is absorbed into the centre. A state with form G on all sites becomes a Vidal. `center` is measured: 0 for
        form B, d - 1 for A, the boundary for A followed by B. An operator starts at IdL and ends at IdR; with
        `explicit_plus_hc` the adjoint is added.

    Raises
    ------
    ArgumentTypeError
        If `obj` is neither, or a state of another kind (a purification has two legs per site).
    ArgumentError
        If it is infinite or a segment, has grouped sites, or lacks singular values that its form requires.
    ModuleNotFoundError
        If TeNPy is not installed.

    Examples
    --------
    >>> from tenpy.networks.mps import MPS
    >>> from tenpy.networks.site import SpinHalfSite
    >>> sites = [SpinHalfSite("Sz")] * 2
    >>> neel = MPS.from_product_state(sites, ["up", "down"], unit_cell_width=2)
    >>> from_tenpy(neel).full()  # up is entry 0; TeNPy, sorted by charge, has down first
    array([[0., 1.],
           [0., 0.]])
    """
    mps, mpo = (import_optional("from_tenpy", f"tenpy.networks.{name}", PACKAGE) for name in ("mps", "mpo"))
    if not isinstance(obj, mps.MPS | mpo.MPO) or getattr(obj, "_B_labels", STATE_LEGS) != STATE_LEGS:
        raise wrong_object("from_tenpy", obj, "an MPS of pure states or an MPO of TeNPy")
    kinds, perms = [type(site).__name__ for site in obj.sites], [np.asarray(site.perm) for site in obj.sites]
    if isinstance(obj, mpo.MPO):
        tensors = [_dense(w, OPERATOR_LEGS) for w in obj._W]
        ends = obj.IdL[0], obj.IdR[-1], bool(obj.explicit_plus_hc)
        return operator_of("from_tenpy: obj", OperatorParts(obj.bc, obj.grouped, kinds, perms, tensors, *ends))
    tensors = [_dense(b, STATE_LEGS) for b in obj._B]
    spectra = [s.to_ndarray() if hasattr(s, "to_ndarray") else s for s in obj._S]
    parts = StateParts(obj.bc, obj.grouped, kinds, perms, tensors, obj.form, spectra, obj.norm)
    return state_of("from_tenpy: obj", parts)


def operator(site: Any, name: str) -> Array:
    """Return an operator of a TeNPy site as a matrix (n, n) in the basis of the legs that `from_tenpy` returns.

    With conserved charges the site sorts its basis, and `site.get_op(name).to_ndarray()` has another order.

    Parameters
    ----------
    site
        A tenpy.networks.site.Site, not a GroupedSite.
    name
        As for `site.get_op`: "Sz", "Cd", "JW", or a product such as "Cd C".

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `site` is none of these, or has no such operator.
    ModuleNotFoundError
        If TeNPy is not installed.

    Examples
    --------
    >>> import tnlib
    >>> from tenpy.networks.mps import MPS
    >>> from tenpy.networks.site import SpinHalfSite
    >>> site, states = SpinHalfSite("Sz"), ["up", "down"] * 2
    >>> neel = from_tenpy(MPS.from_product_state([site] * 4, states, unit_cell_width=4))
    >>> tnlib.expectation(neel, operator(site, "Sz"))
    array([ 0.5, -0.5,  0.5, -0.5])
    """
    sites = import_optional("operator", "tenpy.networks.site", PACKAGE)
    if not isinstance(site, sites.Site) or isinstance(site, sites.GroupedSite):
        raise ArgumentTypeError(
            f"operator: site must be a Site of TeNPy that is not grouped, got a {type(site).__name__}; pass for "
            "example psi.sites[0]."
        )
    if not isinstance(name, str) or not name.split() or not all(map(site.valid_opname, name.split())):
        raise ArgumentError(
            f"operator: name must be one of {', '.join(sorted(site.opnames))}, or a product of them, got {name!r:.80}; "
            "choose one."
        )
    order = np.argsort(site.perm)
    return _dense(site.get_op(name), ["p", "p*"])[np.ix_(order, order)]


@single_threaded_blas
def to_tenpy(value: TensorTrain | Vidal | TTMatrix, sites: Any = None, *, rtol: float | None = None) -> Any:
    """Return `value` as a finite MPS or MPO of TeNPy.

    Parameters
    ----------
    value
        A TensorTrain or Vidal, converted to an MPS; or a TTMatrix with square legs, converted to an MPO.
    sites
        One tenpy.networks.site.Site, or one per core, with the dimensions of the legs. Tensors are stored in charge
        blocks, and legs are sorted by charge. Default: plain sites without charges and operators.
    rtol
        Largest relative norm of the parts with another total charge than the most common one, which are omitted as by
        `project_charge`. Default: 1e4 eps. A truncation mixes charges where it separates nearly equal Schmidt values
        (see `degeneracy_tol` of `tnlib.round` and `tnlib.apply`).

    Returns
    -------
    tenpy.networks.mps.MPS | tenpy.networks.mpo.MPO
        The MPS has numerical ranks, all Schmidt values and the norm: form A left of the centre and B from it on (all B
        without a centre); a Vidal has form G, bit for bit if there are no charges. The MPO has the cores of `value` if
        there are no charges, else right-isometric cores up to a factor each.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `value` and `sites` do not match, `value` mixes a conserved charge by more than `rtol`, or the norm exceeds
        the range of float64, in which TeNPy stores it.
    ModuleNotFoundError
        If TeNPy is not installed.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tenpy.networks.site import SpinHalfSite
    >>> singlet = tnlib.tt_svd(np.array([[0, 3.0], [-3.0, 0]])).value
    >>> state = to_tenpy(singlet, SpinHalfSite("Sz"))
    >>> state.get_SR(0).round(4), f"{state.norm:.4f}"
    (array([0.7071, 0.7071]), '4.2426')
    """
    return build("to_tenpy", value, sites, as_rtol("to_tenpy", rtol))


@single_threaded_blas
def project_charge(value: TensorTrain | Vidal | TTMatrix, sites: Any) -> Fit[Any]:
    """Return the part of a state or operator with the most common total charge, and the relative norm of the rest.

    Parameters
    ----------
    value, sites
        As in `to_tenpy`.

    Returns
    -------
    Fit[TensorTrain] | Fit[TTMatrix]
        The orthogonal projection, not normalized, with its centre at core 0 and legs in physical order.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `value` and `sites` do not match.
    ModuleNotFoundError
        If TeNPy is not installed.

    Examples
    --------
    A state of two spins with total Sz = 0, and 0.1 of its norm with Sz = 1:

    >>> import numpy as np, tnlib
    >>> from tenpy.networks.site import SpinHalfSite
    >>> mixed = tnlib.tt_svd(np.array([[0.1, 0.7], [-0.7, 0.0]])).value
    >>> fit = project_charge(mixed, SpinHalfSite("Sz"))
    >>> fit.value.full().round(4) + 0.0, f"{fit.error:.4f}"
    (array([[ 0. ,  0.7],
           [-0.7,  0. ]]), '0.1005')
    """
    part, error = project_value("project_charge", value, sites)
    return report("project_charge", part, error=error, rtol=None)


def read(path: str | os.PathLike[str], name: str = "/") -> TensorTrain | Vidal | TTMatrix:
    """Read an MPS or MPO from an HDF5 file of TeNPy; TeNPy need not be installed.

    Parameters
    ----------
    path
        The file.
    name
        Path of the object in the file, for example "psi" for the results of a simulation.

    Returns
    -------
    TensorTrain | Vidal | TTMatrix
        As returned by `from_tenpy`. No class named in the file is imported or executed.

    Raises
    ------
    FileFormatError
        If the file is truncated, has another format, or holds types that a state or operator does not have; if it leads
        to data in other files, or would take more memory than `itensor.read` allows.
    MissingFileError
        If there is no such file.
    ModuleNotFoundError
        If h5py is not installed.

    Examples
    --------
    >>> import numpy as np, os, tempfile, tnlib
    >>> from tnlib_adapters.interop import tenpy
    >>> path = os.path.join(tempfile.mkdtemp(), "bell.h5")
    >>> tenpy.write(path, tnlib.tt_svd(np.eye(2) / np.sqrt(2)).value)
    >>> f"{tnlib.entropy(tenpy.read(path), 1) / np.log(2):.4f}"
    '1.0000'
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"tenpy.read: name must be a string, got {name!r}; pass for example name='psi'.")
    with open_hdf5("tenpy.read", path) as root:
        parts = parts_of_file(root, name)
    prefix = f"tenpy.read: the object in {os.fspath(path)}"
    try:
        return operator_of(prefix, parts) if isinstance(parts, OperatorParts) else state_of(prefix, parts)
    except (ArgumentError, ArgumentTypeError) as problem:
        raise FileFormatError(str(problem)) from None


@single_threaded_blas
def write(path: str | os.PathLike[str], value: TensorTrain | Vidal | TTMatrix, sites: Any = None) -> None:
    """Write `value` atomically to an HDF5 file for tenpy.tools.hdf5_io.load.

    Parameters
    ----------
    path
        Output file; an existing file is replaced.
    value, sites
        As in `to_tenpy`.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        As in `to_tenpy`.
    MissingFileError
        If the folder of `path` does not exist.
    ModuleNotFoundError
        If TeNPy or h5py is not installed.

    Examples
    --------
    >>> import numpy as np, os, tempfile, tnlib
    >>> path = os.path.join(tempfile.mkdtemp(), "bell.h5")
    >>> write(path, tnlib.tt_svd(np.eye(2)).value)
    >>> read(path).full().round(12)
    array([[1., 0.],
           [0., 1.]])
    """
    if not isinstance(value, TTMatrix) and len(getattr(value, "shape", ())) == 1:
        raise ArgumentError(
            "tenpy.write: value must have two sites or more, got 1; TeNPy saves no state of one, use tnlib.save."
        )
    obj = build("tenpy.write", value, sites, None)
    hdf5_io = import_optional("tenpy.write", "tenpy.tools.hdf5_io", PACKAGE)
    write_hdf5("tenpy.write", path, lambda opened: hdf5_io.save_to_hdf5(opened, obj))


def _dense(tensor: Any, labels: Sequence[str]) -> Array:
    labels_of_tensor = tensor.get_leg_labels()
    return np.asarray(tensor.to_ndarray()).transpose([labels_of_tensor.index(label) for label in labels])
