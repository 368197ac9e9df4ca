"""TensorLy, TensorKrowch, tntorch, torchTT, teneva and pyttb: `from_X` and `to_X` for objects of each library X.

Their objects are lists of cores (l, n, r) or (l, row, column, r), or of factors, without centre and scale. All pairs of
functions share one contract. Arrays are copied, torch tensors without their gradients, and half precision becomes
single. `center` of a train is measured; its `log_scale` is multiplied into the centre. ArgumentTypeError is raised for
other classes and formats, for two precisions and for two devices; ArgumentError for entries that are not finite, for
shapes that do not match, and for a scale beyond the range of the dtype.

`_LIBRARIES` is the table of what is converted. To add a library, add its row and two functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._format import Format
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib.formats.cp.format import CP
from tnlib.formats.train.cores import diagonal_core, find_center
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.tt_svd import tt_svd
from tnlib.formats.tucker.format import Tucker
from tnlib.interop.core_arrays import as_copies, as_one_precision, with_scale, wrong_object, wrong_value


class _Library(NamedTuple):
    package: str  # for pip
    classes: tuple[str, ...]  # of the objects that `from_X` accepts
    formats: tuple[type[Format], ...]  # of the values that `to_X` accepts


_LIBRARIES = {  # by the names of their modules
    "tensorly": _Library(
        "tensorly",
        ("tt_tensor.TTTensor", "tt_matrix.TTMatrix", "tucker_tensor.TuckerTensor", "cp_tensor.CPTensor"),
        (TensorTrain, TTMatrix, Tucker, CP),
    ),
    "tensorkrowch": _Library("tensorkrowch", ("models.MPS", "models.MPO"), (TensorTrain, TTMatrix)),
    "tntorch": _Library("tntorch", ("Tensor", "TTMatrix", "CPMatrix"), (TensorTrain, TTMatrix, Tucker, CP)),
    "torchtt": _Library("torchTT", ("TT",), (TensorTrain, TTMatrix)),
    "teneva": _Library("teneva", (), (TensorTrain,)),  # functions of lists
    "pyttb": _Library("pyttb", ("ktensor", "ttensor", "tensor"), (CP, Tucker)),
}


def from_tensorly(obj: Any) -> TensorTrain | TTMatrix | Tucker | CP:
    """Return a factorised tensor of TensorLy, in any backend, in the corresponding format.

    Parameters
    ----------
    obj
        A TTTensor, TTMatrix, TuckerTensor or CPTensor, or a list of cores (l, n, r) or (l, m, n, r). Missing weights of
        a CPTensor are ones. Tensor rings, PARAFAC2 and regressions raise ArgumentTypeError.

    References
    ----------
    J. Kossaifi, Y. Panagakis, A. Anandkumar, M. Pantic, "TensorLy: tensor learning in Python", JMLR 20 (2019).

    Examples
    --------
    >>> import numpy as np
    >>> from tensorly.decomposition import tucker
    >>> x = np.add.outer(np.arange(4.0), np.arange(5.0))
    >>> value = from_tensorly(tucker(x, rank=[2, 2]))
    >>> value.ranks, f"{np.linalg.norm(value.full() - x):.4f}"
    ((2, 2), '0.0000')
    """
    tl = _import("from_tensorly", "tensorly") if isinstance(obj, list | tuple) else _library_of("tensorly", obj)
    if isinstance(obj, tl.cp_tensor.CPTensor):
        factors = as_copies("from_tensorly", "factor", list(obj.factors))
        if obj.weights is None:
            return CP(np.ones(factors[0].shape[-1], factors[0].real.dtype), factors)
        weights, *factors = as_copies("from_tensorly", "array", [obj.weights, *obj.factors])
        return CP(weights, factors)
    if isinstance(obj, tl.tucker_tensor.TuckerTensor):
        core, *factors = as_copies("from_tensorly", "array", [obj.core, *obj.factors])
        return Tucker(core, factors)
    return _train("from_tensorly", list(obj))


def to_tensorly(value: TensorTrain | TTMatrix | Tucker | CP) -> Any:
    """Return `value` as a TTTensor, TTMatrix, TuckerTensor or CPTensor of TensorLy, in its current backend.

    All arrays have one dtype, except the weights of a CP, which keep theirs.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> obj = to_tensorly(tnlib.tt_svd(np.ones((2, 3, 4))).value)
    >>> obj.rank, f"{obj.to_tensor().sum():.1f}"
    ((1, 1, 1, 1), '24.0')
    """
    tl = _library_for("tensorly", value)
    if isinstance(value, Tucker):
        core, *factors = (tl.tensor(np.array(a, value.dtype)) for a in value.arrays())
        return tl.tucker_tensor.TuckerTensor((core, factors))
    if isinstance(value, CP):
        dtype = np.result_type(*value.factors)
        factors = [tl.tensor(np.array(factor, dtype)) for factor in value.factors]
        return tl.cp_tensor.CPTensor((tl.tensor(np.array(value.weights)), factors))
    kind = tl.tt_tensor.TTTensor if isinstance(value, TensorTrain) else tl.tt_matrix.TTMatrix
    return kind([tl.tensor(core) for core in with_scale("to_tensorly", value)])


def from_tensorkrowch(obj: Any) -> TensorTrain | TTMatrix:
    """Return an MPS or MPO of TensorKrowch as a train.

    Parameters
    ----------
    obj
        An open `tensorkrowch.models.MPS`, MPSLayer or MPO; leg k is feature k, and the list of input features is
        dropped. Inputs are rows, as in its `mat_to_mpo`: the model maps data x to `x @ A`. The vectors that close the
        chain are multiplied into the end cores. A periodic boundary raises ArgumentError.

    References
    ----------
    J. R. Pareja Monturiol, D. Perez-Garcia, A. Pozas-Kerstjens, "TensorKrowch: smooth integration of tensor networks
    in machine learning", Quantum 8 (2024).

    Examples
    --------
    >>> import tensorkrowch as tk
    >>> mps = tk.models.MPS(n_features=3, phys_dim=2, bond_dim=2, init_method="ones")
    >>> value = from_tensorkrowch(mps)
    >>> value.ranks, f"{value.full()[0, 1, 0]:.1f}"
    ((1, 2, 2, 1), '4.0')
    """
    _library_of("tensorkrowch", obj)
    if obj.boundary != "obc":
        raise ArgumentError(
            f"from_tensorkrowch: obj must have an open boundary, got {obj.boundary!r}; a train has no bond between its "
            "ends."
        )
    nodes = list(obj.mats_env)
    ends_and_nodes = [a.tensor for a in (obj.left_node, obj.right_node, *nodes)]
    left, right, *tensors = as_one_precision("from_tensorkrowch", "tensor", ends_and_nodes)
    names = [name for name in ("left", "input", "output", "right") if name in nodes[0].axes_names]
    cores = [a.transpose([node.axes_names.index(i) for i in names]) for node, a in zip(nodes, tensors, strict=True)]
    cores[0] = np.tensordot(left, cores[0], (0, 0))[None]  # 1 [l] n (m) r
    cores[-1] = np.tensordot(cores[-1], right, (-1, 0))[..., None]  # l n (m) [r] 1
    return _train("from_tensorkrowch", cores)


def to_tensorkrowch(value: TensorTrain | TTMatrix) -> Any:
    """Return `value` as an MPS or MPO of TensorKrowch with trainable tensors on the CPU, every feature an input.

    Rows of a TTMatrix are inputs: pass `value.T` if they are outputs. TensorKrowch pads the end cores with zeros.

    Examples
    --------
    >>> import numpy as np, tnlib, torch
    >>> mps = to_tensorkrowch(tnlib.tt_svd(np.ones((2, 3))).value)
    >>> ones = [torch.ones(1, n, dtype=torch.float64) for n in (2, 3)]
    >>> f"{mps(ones).detach().item():.1f}"
    '6.0'
    """
    tk = _library_for("tensorkrowch", value)
    cores = with_scale("to_tensorkrowch", value)
    if isinstance(value, TTMatrix):
        cores = [core.swapaxes(2, 3) for core in cores]  # l m r n
        cores[-1] = cores[-1][:, :, 0]
    else:
        cores[-1] = cores[-1][..., 0]
    cores[0] = cores[0][0]
    model = tk.models.MPS if isinstance(value, TensorTrain) else tk.models.MPO
    return model(tensors=_to_torch([np.ascontiguousarray(core) for core in cores]))


def from_tntorch(obj: Any) -> TensorTrain | TTMatrix | CP:
    """Return a tensor or matrix of tntorch in the corresponding format.

    Parameters
    ----------
    obj
        A `tntorch.Tensor`, TTMatrix or CPMatrix; a batch raises ArgumentError. Cores may be train cores (l, n, r) and
        CP factors (n, R); `Us[k]` (n, s) multiplies leg k. Inputs of a matrix are rows.

    Returns
    -------
    TensorTrain | TTMatrix | CP
        CP with unit weights if every core is a CP factor. Otherwise a train: Tucker factors are multiplied into their
        cores (`tnlib.convert(value, tnlib.Tucker)` recovers them), CP factors become diagonal cores (R, n, R), and
        outer bonds are summed over.

    References
    ----------
    M. Usvyatsov, R. Ballester-Ripoll, K. Schindler, "tntorch: tensor network learning with PyTorch", JMLR 23 (2022).

    Examples
    --------
    >>> import tntorch, torch
    >>> # the one in the middle is a CP factor
    >>> cores = [torch.ones(1, 2, 3), torch.ones(4, 3), torch.ones(3, 5, 1)]
    >>> value = from_tntorch(tntorch.Tensor(cores))
    >>> value.shape, value.ranks, f"{value.full()[0, 0, 0]:.1f}"
    ((2, 4, 5), (1, 3, 3, 1), '3.0')
    """
    tn = _library_of("tntorch", obj)
    if getattr(obj, "batch", False):
        raise ArgumentError(
            f"from_tntorch: obj must be one tensor, got a batch of {len(obj.cores[0])}; take them one by one."
        )
    is_matrix = not isinstance(obj, tn.Tensor)
    factors = {} if is_matrix else {k: u for k, u in enumerate(obj.Us) if u is not None}
    arrays = as_one_precision("from_tntorch", "core", [*obj.cores, *factors.values()])
    cores = arrays[: len(obj.cores)]
    for k, u in zip(factors, arrays[len(cores) :], strict=True):
        cores[k] = np.moveaxis(np.tensordot(u, cores[k], (1, -2)), 0, -2)  # (l) n [s] r
    if not is_matrix and all(core.ndim == 2 for core in cores):
        return CP(np.ones(cores[0].shape[1], cores[0].real.dtype), cores)
    cores = [core if core.ndim == 3 + is_matrix else diagonal_core(core) for core in cores]
    cores[0] = cores[0].sum(axis=0, keepdims=True)  # 1 n r
    cores[-1] = cores[-1].sum(axis=-1, keepdims=True)  # l n 1
    return _train("from_tntorch", cores)


def to_tntorch(value: TensorTrain | TTMatrix | Tucker | CP) -> Any:
    """Return `value` as a Tensor or TTMatrix of tntorch, on the CPU.

    A CP becomes factors, the first one scaled by the weights; a Tucker its factors and an exact train of its core.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> obj = to_tntorch(tnlib.CP([2.0], [np.ones((3, 1)), np.ones((4, 1))]))
    >>> [tuple(core.shape) for core in obj.cores], f"{float(obj.torch().sum()):.1f}"
    ([(3, 1), (4, 1)], '24.0')
    """
    tn = _library_for("tntorch", value)
    if isinstance(value, CP):
        first, *others = (np.array(factor, value.dtype) for factor in value.factors)
        return tn.Tensor(_to_torch([first * value.weights, *others]))
    if isinstance(value, Tucker):
        core, *factors = (np.array(a, value.dtype) for a in value.arrays())
        return tn.Tensor(_to_torch(with_scale("to_tntorch", tt_svd(core).value)), Us=_to_torch(factors))
    cores = _to_torch(with_scale("to_tntorch", value))
    if isinstance(value, TensorTrain):
        return tn.Tensor(cores)
    return tn.TTMatrix(cores, list(value.ranks[1:-1]), list(value.row_shape), list(value.col_shape))


def from_torchtt(obj: Any) -> TensorTrain | TTMatrix:
    """Return a `torchtt.TT`, tensor or operator, as a train; rows are the sizes M, columns N.

    References
    ----------
    I.-G. Ion, D. Loukrezis, H. De Gersem, torchTT, https://github.com/ion-g-ion/torchTT.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> obj = to_torchtt(tnlib.TensorTrain([np.ones((1, 2, 2)), np.ones((2, 3, 1))]))
    >>> value = from_torchtt(obj + obj)
    >>> value.shape, value.ranks, f"{value.full()[0, 0]:.1f}"
    ((2, 3), (1, 4, 1), '4.0')
    """
    _library_of("torchtt", obj)
    return _train("from_torchtt", obj.cores)


def to_torchtt(value: TensorTrain | TTMatrix) -> Any:
    """Return `value` as a `torchtt.TT`, on the CPU.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> f"{float(to_torchtt(tnlib.tt_svd(np.ones((2, 3))).value).norm()):.4f}"
    '2.4495'
    """
    return _library_for("torchtt", value).TT(_to_torch(with_scale("to_torchtt", value)))


def from_teneva(obj: Any) -> TensorTrain:
    """Return a list of numpy arrays (l, n, r), the trains of teneva, as a TensorTrain.

    For a stabilised train, a pair of a list and a power of two, pass the list and multiply by the power.

    References
    ----------
    A. Chertkov, G. Ryzhakov, I. Oseledets, "Black box approximation in the tensor train format initialized by ANOVA
    decomposition", SIAM J. Sci. Comput. 45 (2023).

    Examples
    --------
    >>> import teneva
    >>> value = from_teneva(teneva.const([2, 3, 4], v=5.0))
    >>> value.ranks, f"{value.full()[1, 2, 3]:.1f}"
    ((1, 1, 1, 1), '5.0')
    """
    if not isinstance(obj, list | tuple) or not obj:
        raise wrong_object("from_teneva", obj, "a list of cores")
    if len(obj) == 2 and isinstance(obj[0], list) and not isinstance(obj[1], list):
        raise ArgumentTypeError(
            "from_teneva: obj must be a list of cores, got a list of cores and a power of two; pass the first and "
            "multiply with the second."
        )
    cores = as_one_precision("from_teneva", "core", list(obj))
    return TensorTrain(cores, find_center(cores))


def to_teneva(value: TensorTrain) -> list[Array]:
    """Return `value` as a list of cores (l, n, r) of one dtype, the trains of teneva.

    teneva has no Tucker and CP, and only square TT-matrices with legs of size 2. Not all of its functions support
    complex cores.

    Examples
    --------
    >>> import numpy as np, teneva, tnlib
    >>> f"{teneva.norm(to_teneva(tnlib.tt_svd(np.ones((2, 3))).value)):.4f}"
    '2.4495'
    """
    _check_format("teneva", value)
    return with_scale("to_teneva", value)


def from_pyttb(obj: Any) -> CP | Tucker | Array:
    """Return a ktensor, ttensor or dense tensor of pyttb, the Tensor Toolbox for Python, as CP, Tucker or numpy array.

    Arrays are in C order. A sparse core or factor becomes dense. Weights and columns are unchanged;
    `tnlib.canonical_form` fixes a gauge.

    References
    ----------
    D. M. Dunlavy, N. T. Johnson, and others, pyttb: Python Tensor Toolbox, https://github.com/sandialabs/pyttb.

    Examples
    --------
    >>> import numpy as np, pyttb
    >>> factors = [np.ones((2, 1)), np.ones((3, 1))]
    >>> value = from_pyttb(pyttb.ktensor(factors, np.array([5.0])))
    >>> value.shape, f"{value.full()[1, 2]:.1f}"
    ((2, 3), '5.0')
    """
    ttb = _library_of("pyttb", obj)
    if isinstance(obj, ttb.ktensor):
        weights, *factors = as_copies("from_pyttb", "array", [obj.weights, *obj.factor_matrices])
        return CP(weights, factors)
    if isinstance(obj, ttb.tensor):
        return as_copies("from_pyttb", "array", [obj.data])[0]
    core = obj.core.full().data if isinstance(obj.core, ttb.sptensor) else obj.core.data
    factors = [f.toarray() if hasattr(f, "toarray") else f for f in obj.factor_matrices]
    core, *factors = as_copies("from_pyttb", "array", [core, *factors])
    return Tucker(core, factors)


def to_pyttb(value: CP | Tucker) -> Any:
    """Return `value` as a ktensor or ttensor of pyttb, in Fortran order; pyttb has no tensor trains.

    A CP of another dtype than float64, the only one of a ktensor, raises ArgumentTypeError.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> obj = to_pyttb(tnlib.CP([2.0, 1.0], [np.eye(3, 2)] * 3))
    >>> obj.ncomponents, f"{obj.norm():.4f}"
    (2, '2.2361')
    """
    ttb = _library_for("pyttb", value)
    if isinstance(value, Tucker):
        core, *factors = (np.array(a, value.dtype, order="F") for a in value.arrays())
        return ttb.ttensor(ttb.tensor(core), factors)
    if value.dtype != np.float64:
        raise ArgumentTypeError(
            f"to_pyttb: value must be float64, the only dtype of a ktensor, got {value.dtype}; convert its factors "
            "first."
        )
    return ttb.ktensor([np.array(f, order="F") for f in value.factors], np.array(value.weights))


def _import(function: str, name: str) -> Any:
    with warnings.catch_warnings():  # torchTT warns if its compiled extension is missing; it is not used here
        warnings.simplefilter("ignore", UserWarning)
        return import_optional(function, name, _LIBRARIES[name].package)


def _library_of(name: str, obj: Any) -> Any:
    """Return the library, or raise if `obj` is not of one of its classes in the table."""
    library, classes = _import(f"from_{name}", name), _LIBRARIES[name].classes
    if not isinstance(obj, tuple(attrgetter(path)(library) for path in classes)):
        names = [path.rpartition(".")[2] for path in classes]
        raise wrong_object(f"from_{name}", obj, f"of class {' or '.join(names)}")
    return library


def _library_for(name: str, value: Any) -> Any:
    """Return the library, or raise if `value` has no format that it can hold."""
    _check_format(name, value)
    return _import(f"to_{name}", name)


def _check_format(name: str, value: Any) -> None:
    formats = _LIBRARIES[name].formats
    if not isinstance(value, formats):
        raise wrong_value(f"to_{name}", value, f"a {' or '.join(kind.__name__ for kind in formats)}")


def _train(function: str, arrays: Sequence[Any]) -> TensorTrain | TTMatrix:
    """Return the train of cores (l, n, r), or the TT-matrix of cores (l, m, n, r), with its measured centre."""
    cores = as_one_precision(function, "core", arrays)
    n_legs = {core.ndim for core in cores}
    if n_legs not in ({3}, {4}):
        raise ArgumentError(
            f"{function}: obj must have cores of 3 legs each or of 4 legs each, got {[core.ndim for core in cores]}; "
            "in TensorLy, wrap weights and factors in a CPTensor, a core and factors in a TuckerTensor."
        )
    return (TensorTrain if n_legs == {3} else TTMatrix)(cores, find_center(cores))


def _to_torch(arrays: Sequence[Array]) -> list[Any]:
    """Return torch tensors on the CPU that share memory with the arrays."""
    torch = import_optional("to_torch", "torch", "torch")
    return [torch.from_numpy(a) for a in arrays]
