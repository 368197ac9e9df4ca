"""Finite matrix product states and operators of TeNPy, as objects and as HDF5 files, in and out.

TeNPy keeps Schmidt values and a form beside its tensors, the norm apart, and blocks of definite charge; over sites that
conserve one it sorts the local basis. Here every leg is as physics numbers it. What TeNPy knows of a site beside its
basis (names of states and operators, Jordan-Wigner strings) is not carried: the amplitudes of fermions are those of the
ordered Fock basis, and signs between sites are up to who applies operators.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError, FileFormatError
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.interop._shared import open_hdf5, write_hdf5
from tnlib_adapters.interop._tenpy_build import PACKAGE, build
from tnlib_adapters.interop._tenpy_file import parts_of_file
from tnlib_adapters.interop._tenpy_parts import OPERATOR_LEGS, STATE_LEGS, OperatorParts, StateParts, operator, state


def from_tenpy(obj: Any) -> TensorTrain | Vidal | TTMatrix:
    """Return the train that a finite MPS or MPO of TeNPy is.

    Parameters
    ----------
    obj
        A tenpy.networks.mps.MPS or tenpy.networks.mpo.MPO with finite boundary conditions, of any form and charges.
        Sizes may differ from site to site.

    Returns
    -------
    TensorTrain | Vidal | TTMatrix
        Dense cores of the dtype that holds all of them, legs in the order that the sites have without charges. `norm`
        becomes `log_scale`; its phase, if any, goes into the centre. A state all in form G is a Vidal. `center` is
        measured: 0 for form B, d - 1 for A, the seam for A before and B behind it. An operator begins at its IdL and
        ends at its IdR, with the adjoint added where TeNPy would add it later.

    Raises
    ------
    ArgumentTypeError
        If `obj` is neither, or a state of another kind (a purification has two legs per site).
    ArgumentError
        If it is infinite or a segment, has grouped sites, or lacks singular values that its form asks for.
    ModuleNotFoundError
        If TeNPy is not installed.

    Examples
    --------
    >>> from tenpy.networks.mps import MPS
    >>> from tenpy.networks.site import SpinHalfSite
    >>> neel = MPS.from_product_state([SpinHalfSite("Sz")] * 2, ["up", "down"], unit_cell_width=2)
    >>> from_tenpy(neel).full()  # up is entry 0, though TeNPy sorts by charge and stores down first
    array([[0., 1.],
           [0., 0.]])
    """
    mps, mpo = (import_optional("from_tenpy", f"tenpy.networks.{name}", PACKAGE) for name in ("mps", "mpo"))
    if not isinstance(obj, mps.MPS | mpo.MPO) or getattr(obj, "_B_labels", STATE_LEGS) != STATE_LEGS:
        raise ArgumentTypeError(
            f"from_tenpy: obj must be an MPS of pure states or an MPO of TeNPy, got a {type(obj).__name__}; bring it "
            "to one of the two first."
        )
    kinds, perms = [type(site).__name__ for site in obj.sites], [np.asarray(site.perm) for site in obj.sites]
    if isinstance(obj, mpo.MPO):
        tensors = [_dense(w, OPERATOR_LEGS) for w in obj._W]
        ends = obj.IdL[0], obj.IdR[-1], bool(obj.explicit_plus_hc)
        return operator("from_tenpy: obj", OperatorParts(obj.bc, obj.grouped, kinds, perms, tensors, *ends))
    tensors = [_dense(b, STATE_LEGS) for b in obj._B]
    spectra = [s.to_ndarray() if hasattr(s, "to_ndarray") else s for s in obj._S]
    parts = StateParts(obj.bc, obj.grouped, kinds, perms, tensors, obj.form, spectra, obj.norm)
    return state("from_tenpy: obj", parts)


@single_threaded_blas
def to_tenpy(value: TensorTrain | Vidal | TTMatrix, sites: Any = None) -> Any:
    """Return `value` as a finite MPS or MPO of TeNPy.

    Parameters
    ----------
    value
        A TensorTrain or Vidal, which becomes an MPS; or a TTMatrix with as many rows as columns on every site, which
        becomes an MPO.
    sites
        One tenpy.networks.site.Site, or one per core, of the sizes of the legs. Tensors get the blocks that their
        charges allow, and legs are sorted as the sites are. By default plain sites without charges or operators.

    Returns
    -------
    tenpy.networks.mps.MPS | tenpy.networks.mpo.MPO
        The MPS in its numerical ranks, with all its Schmidt values and its norm: in form A left of the centre and B
        from it on (all B where there is none), a Vidal in form G, bit for bit where there are no charges. The MPO has
        the cores of `value` where there are no charges, and else such that are right-isometric up to a factor each.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `value` or `sites` do not fit, the sites conserve a charge that `value` mixes, or the norm leaves the range
        of float64, in which TeNPy keeps it.
    ModuleNotFoundError
        If TeNPy is not installed.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tenpy.networks.site import SpinHalfSite
    >>> singlet = to_tenpy(tnlib.tt_svd(np.array([[0, 3.0], [-3.0, 0]])).value, SpinHalfSite("Sz"))
    >>> singlet.get_SR(0).round(4), f"{singlet.norm:.4f}"
    (array([0.7071, 0.7071]), '4.2426')
    """
    return build("to_tenpy", value, sites)


def read(path: str | os.PathLike[str], name: str = "/") -> TensorTrain | Vidal | TTMatrix:
    """Read an MPS or MPO from an HDF5 file that TeNPy saved; TeNPy itself is not needed.

    Parameters
    ----------
    path
        The file.
    name
        Where in it the object is, for example "psi" of the results of a simulation.

    Returns
    -------
    TensorTrain | Vidal | TTMatrix
        What `from_tenpy` returns. Nothing the file names is looked up, imported or run.

    Raises
    ------
    FileFormatError
        If the file is cut short, of another kind, or holds types that a state or operator has not.
    MissingFileError
        If there is no such file.
    ModuleNotFoundError
        If h5py is not installed.

    Examples
    --------
    See `write`.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"tenpy.read: name must be a string, got {name!r}; pass for example name='psi'.")
    with open_hdf5("tenpy.read", path) as (file, opened):
        parts = parts_of_file(opened, name)
    name = f"tenpy.read: the object in {file}"
    try:
        return operator(name, parts) if isinstance(parts, OperatorParts) else state(name, parts)
    except (ArgumentError, ArgumentTypeError) as problem:
        raise FileFormatError(str(problem)) from None


@single_threaded_blas
def write(path: str | os.PathLike[str], value: TensorTrain | Vidal | TTMatrix, sites: Any = None) -> None:
    """Write `value` to an HDF5 file that tenpy.tools.hdf5_io.load loads; it appears whole or not at all.

    Parameters
    ----------
    path
        Where to write; an existing file is replaced.
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
    made = build("tenpy.write", value, sites)
    hdf5_io = import_optional("tenpy.write", "tenpy.tools.hdf5_io", PACKAGE)
    write_hdf5("tenpy.write", path, lambda opened: hdf5_io.save_to_hdf5(opened, made))


def _dense(tensor: Any, labels: Sequence[str]) -> Array:
    found = tensor.get_leg_labels()
    return np.asarray(tensor.to_ndarray()).transpose([found.index(label) for label in labels])
