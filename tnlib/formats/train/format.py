"""Tensor trains (matrix product states), and what they share with TT-matrices."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
import numpy.typing as npt

from tnlib._array_api import astype, contiguous, dtype_of, from_host, namespace, refuse_different_libraries, reshape
from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import refuse_other_arrays
from tnlib._format import LinearFormat, numpy_arrays, refuse_different_legs, refuse_other_format
from tnlib._registry import require
from tnlib._stored_arrays import (
    MAX_NDIM,
    SMALL,
    as_numbers_list,
    in_common_dtype,
    numbered,
    read_only,
    refuse_too_large,
    set_fields,
)
from tnlib._typing import Array
from tnlib._validate import as_integer, as_list, as_position, as_real
from tnlib.formats.train import cores as raw
from tnlib.formats.train.indexing import entry_of, parse_index, selects_all
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import (
    DRIFT,
    Scaled,
    fold,
    norm,
    normalize,
    prepare_each,
    rescale,
    rescale_each,
    shift_in_range,
    split_exponential,
)

_NAMES = {  # of other libraries
    "to_dense": "value.full()",
    "max_bond": "max(value.ranks)",
    "bond_size": "value.ranks[bond]",
    "chi": "value.ranks",
    "compress": "tnlib.round(value)",
    "truncate": "tnlib.round(value)",
    "entropy": "tnlib.entropy(value, bond)",
    "entanglement_entropy": "tnlib.entropies(value)",
    "schmidt_values": "tnlib.schmidt_values(value, bond)",
    "overlap": "tnlib.inner(value, other)",
    "normalize": "value / value.norm()",
    "canonicalize": "tnlib.canonicalize(value, center)",
    "canonical_form": "tnlib.canonicalize(value, center)",
    "expectation_value": "tnlib.expectation(value, operator)",
}
_LOG_SCALE_LIMIT = 1e12  # of log_scale, beyond which its fraction is lost to rounding


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Train(LinearFormat):
    """Cores of one dtype, the core that the others are isometric towards, and an integer power of two.

    Cores are in range: products of a core with itself neither overflow nor underflow. A larger scale goes into
    `exponent` when the train is created, so that sweeps work on plain arrays.
    """

    cores: tuple[Array, ...]
    center: int | None
    exponent: int

    _core_ndim: ClassVar[int]

    def __init__(
        self, cores: Sequence[Array], center: int | None = None, log_scale: float | None = None, *, exponent: int = 0
    ) -> None:
        name = type(self).__name__
        refuse_different_libraries(name, as_list(name, "cores", cores, "arrays"))
        for k in {0, len(cores) - 1}:
            shape = tuple(getattr(cores[k], "shape", ()))
            if len(shape) == self._core_ndim - 1 and shape[-1 if k else 0] != 1:
                raise ArgumentError(
                    f"{name}: core {k} must have {self._core_ndim} legs, got shape {shape}; an outer bond is a leg of "
                    f"size 1: {(*shape, 1) if k else (1, *shape)}."
                )
        stored = as_numbers_list(name, "core", cores, ndim=self._core_ndim)
        check_bonds(name, stored)
        center = None if center is None else as_position(name, "center", center, len(stored), "cores")
        arrays, power = prepare_each(name, "core", in_common_dtype(stored))
        exponent = as_integer(name, "exponent", exponent, "a float as log_scale")
        if abs(exponent) > _LOG_SCALE_LIMIT:
            raise ArgumentError(
                f"{name}: exponent must lie between -1e12 and 1e12, got one beyond; use zero cores for 0."
            )
        if log_scale is not None:
            exponent, factor = split_exponential(as_log_scale(name, log_scale))
            if factor != 1.0:  # the centre, or the first core, leaves the gauge as it is
                arrays[center or 0] = arrays[center or 0] * factor
        set_fields(self, cores=tuple(map(read_only, arrays)), center=center, exponent=power + exponent)

    @classmethod
    def from_sweep(cls, cores: Sequence[Array], center: int | None = None, exponent: int = 0) -> Self:
        """Return 2**exponent times the train of `cores` that are in range; nothing is validated."""
        self = object.__new__(cls)
        vars(self).update(cores=tuple([read_only(core) for core in cores]), center=center, exponent=exponent)
        return self

    @classmethod
    def from_products(cls, cores: Sequence[Array], exponent: int = 0) -> Self:
        """Return 2**exponent times the train of `cores` whose entries are products of two entries in range."""
        scaled, power = rescale_each(cores)
        return cls.from_sweep(scaled, None, exponent + power).folded()

    def folded(self) -> Self:
        """Return the same train with the power of two in the centre, or in core 0, if that array can carry it."""
        if self.exponent == 0:
            return self
        k = self.center or 0
        return self._with_core(k, self.cores[k], self.exponent)

    def _with_core(self, k: int, core: Array, exponent: int) -> Self:
        """Return the train with another core k, the power of two in it if it can carry that; nothing is validated."""
        core, exponent = fold(core, exponent)
        new = object.__new__(type(self))
        cores = (*self.cores[:k], read_only(core), *self.cores[k + 1 :])
        set_fields(new, cores=cores, center=self.center, exponent=exponent)
        return new

    def fused(self) -> TensorTrain:
        """Return the train of cores (l, n, r), the two legs of TT-matrix cores as one."""
        return TensorTrain.from_sweep(raw.fuse_legs(self.cores), self.center, self.exponent)

    def unfused(self, train: TensorTrain) -> Self:
        """Return `train`, of the legs of `self.fused()`, as a train of this kind, `folded`."""
        split = [
            reshape(contiguous(core), (core.shape[0], *mine.shape[1:-1], core.shape[-1]))
            for core, mine in zip(train.cores, self.cores, strict=True)
        ]
        return self.from_sweep(split, train.center, train.exponent).folded()

    def attributes(self) -> dict[str, Any]:
        """Return the centre and the power of two."""
        return {"center": self.center, "exponent": self.exponent}

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Self:
        """Return the train with these cores; files of version 1 have `log_scale` instead of `exponent`."""
        scale = {name: attributes[name] for name in ("log_scale", "exponent") if name in attributes}
        return cls(numbered(arrays, "cores"), attributes["center"], **scale)

    def gauge_error(self) -> str | None:
        """Return an error if cores are not isometric towards the centre."""
        if self.center is None or raw.find_center(self.cores, self.center) == self.center:
            return None
        return f"all cores but core {self.center}, the centre, must be isometric towards it, and are not"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            where = f"; use {_NAMES[name]}" if name in _NAMES else ""
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'{where}", name=name, obj=self
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the cores."""
        return dtype_of(self.cores[0])

    @numpy_arrays
    def astype(self, dtype: npt.DTypeLike) -> Self:
        """Return the same train with cores of `dtype`: float32, float64, complex64 or complex128."""
        target = self._target_dtype(dtype)
        if target == self.dtype:
            return self
        scaled, power = rescale_each(self.cores, dtype=target)
        cores = [core.astype(target) for core in scaled]
        return self.from_sweep(cores, self.center, self.exponent + power).folded()

    @property
    def log_scale(self) -> float:
        """Natural logarithm of 2**exponent."""
        return self.exponent * math.log(2)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All d + 1 bond sizes (r[0], ..., r[d])."""
        return (1, *(core.shape[-1] for core in self.cores))

    def norm(self) -> float | Any:
        """Frobenius norm, without cancellation; raises ArgumentError beyond float64, where `log_norm` does not.

        Of a train of another library, such as torch, an array (), which torch differentiates: the root of the inner
        product with itself, wrong by up to the root of roundoff where terms cancel.
        """
        if self.library != "numpy":
            square, e = require("norm", "inner", "the value", self, "")(self, self)
            xp = namespace(square)
            root = shift_in_range(
                xp.sqrt(xp.abs(square) * 2.0 ** (e % 2)),
                e // 2,
                f"{type(self).__name__}.norm: the norm",
                "lower the log_scale",
            )
            return reshape(root, ())
        try:
            return self._remainder().norm()
        except OverflowError:
            raise ArgumentError(
                f"{type(self).__name__}.norm: the norm must lie below 1.8e308, got exp({self.log_norm():.1f}); "
                "use log_norm()."
            ) from None

    @numpy_arrays
    def log_norm(self) -> float:
        """Natural logarithm of the Frobenius norm; -inf for zero."""
        return self._remainder().log2_norm() * math.log(2)

    def is_subnormal(self) -> bool:
        """Test if the norm is so small that the rounding of entries is not relative; cores are in range."""
        if self.exponent >= 0:
            return False
        return -math.inf < self._remainder().log2_norm() < math.log2(np.finfo(self.dtype).tiny)

    def _remainder(self) -> Scaled:
        """Return an array of the norm of the train: the centre, or the triangular factor of the last core."""
        if self.center is not None:
            return Scaled(self.cores[self.center], self.exponent)
        first, *others = raw.fuse_legs(self.cores)
        carry = Scaled(r_factor(raw.rows(first)), self.exponent)
        for core in others:
            grown = carry.update(raw.rows(raw.attach_left(carry.array, core)))  # l [r] n r'
            carry = grown.update(r_factor(grown.array))
        return carry

    def _in_range(self, method: str, a: Array, e: int) -> Array:
        """Return `a` * 2**`e`, a contraction of the cores, times the scale of the train."""
        e += self.exponent
        if e == 0:
            return a
        subject = f"{type(self).__name__}.{method}: every entry"
        return shift_in_range(a, e, subject, "lower the log_scale")

    @numpy_arrays
    def conj(self) -> Self:
        """Return the complex conjugate, core by core."""
        return self.from_sweep([core.conj() for core in self.cores], self.center, self.exponent)

    def _part(self, *, imaginary: bool) -> Self:
        """Return the real or the imaginary part: bonds double."""
        return self.from_sweep(raw.real_part(self.cores, imaginary=imaginary), None, self.exponent)

    def __mul__(self, other: Any) -> Self:
        """Multiply with a number, or entry by entry with a train of the same legs: ranks multiply."""
        if isinstance(other, type(self)):
            refuse_other_arrays(f"{type(self).__name__}.mul", "the value", self)
            refuse_different_legs(f"{type(self).__name__} * {type(other).__name__}", self, other)
            a, b = self.fused(), other.fused()
            product = raw.multiply_entries(a.cores, b.cores)
            return self.unfused(TensorTrain.from_products(product, a.exponent + b.exponent))
        refuse_other_format("*", self, other)
        return super().__mul__(other)

    def _multiplied(self, number: Any) -> Self:
        dtype, k = np.result_type(self.dtype, number), self.center or 0
        # in a more precise dtype the cores are isometric to the precision of the old one only
        center = self.center if np.finfo(dtype).precision == np.finfo(self.dtype).precision else None
        train = self.from_sweep([astype(core, dtype) for core in self.cores], center, self.exponent)
        e = math.frexp(max(abs(number.real), abs(number.imag)))[1]
        if abs(e) < DRIFT:
            core, power = rescale(train.cores[k] * dtype.type(number).item())
        else:
            factor, power = normalize(np.asarray(number, np.result_type(np.float64, number))[None])
            core = train.cores[k] * factor.item()
        return train._with_core(k, core, self.exponent + power)

    def _added(self, other: Self) -> Self:
        a, b = self.fused(), other.fused()
        terms, exponent = raw.with_common_exponent([(a.cores, a.exponent), (b.cores, b.exponent)])
        return self.unfused(TensorTrain.from_sweep(raw.add_cores(terms), None, exponent))

    @property
    def _legs(self) -> tuple[Any, ...]:
        sizes = [core.shape[1:-1] for core in self.cores]
        return tuple([legs[0] if len(legs) == 1 else legs for legs in sizes])


@dataclass(frozen=True, eq=False, repr=False, init=False)
class TensorTrain(Train):
    """A chain of cores contracted over their bonds, times exp(log_scale).

    Parameters
    ----------
    cores
        Core k of shape (r[k], n[k], r[k+1]), r[0] = r[d] = 1. Bond k lies between cores k - 1 and k.
    center
        The core towards which all others are isometric, not verified; None if unknown. Negative positions count from
        the end.
    log_scale
        Natural logarithm of a positive factor. The nearest power of two is stored in `exponent`, and a core is
        multiplied by the remaining factor.
    exponent
        Binary logarithm of the factor, an integer, where `log_scale` is None.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011); U. Schollwoeck, "The density-matrix
    renormalization group in the age of matrix product states", Annals of Physics 326 (2011), section 4.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tt = tnlib.TensorTrain([np.ones((1, 2, 3)), np.ones((3, 4, 1))])
    >>> tt.shape, tt.ranks, tt.n_parameters, float(tt.full()[0, 0])
    ((2, 4), (1, 3, 1), 18, 3.0)
    """

    _core_ndim = 3

    def fused(self) -> TensorTrain:
        """Return the train itself."""
        return self

    def unfused(self, train: TensorTrain) -> TensorTrain:
        """Return `train`, `folded`."""
        return train.folded()

    def __matmul__(self, other: Any) -> Any:
        """Refuse two trains: `tnlib.inner` is their overlap. A train times a TTMatrix is a row times a matrix."""
        if isinstance(other, TensorTrain):
            raise ArgumentTypeError(
                "TensorTrain @ TensorTrain: one must be a TTMatrix, got two trains; tnlib.inner is their overlap, "
                "tnlib.outer their product."
            )
        return NotImplemented

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the outer legs."""
        return tuple([core.shape[1] for core in self.cores])

    def full(self) -> Array:
        """Contract to the dense array (n[0], ..., n[d-1])."""
        shape = self.shape
        if len(shape) > MAX_NDIM or math.prod(shape) > SMALL:
            refuse_too_large(self)
        dense, e = raw.contract_cores(self.cores)
        return reshape(self._in_range("full", dense, e), shape)  # type: ignore[no-any-return]

    @property
    @numpy_arrays
    def T(self) -> TensorTrain:
        """The transpose, its legs and so its cores in reverse order."""
        reverse = tuple(core.transpose(2, 1, 0) for core in reversed(self.cores))  # r n l
        center = None if self.center is None else len(reverse) - 1 - self.center
        return TensorTrain.from_sweep(reverse, center, self.exponent)

    @numpy_arrays
    def __getitem__(self, index: Any) -> Any:
        """Fix legs with integers, cut them with slices: a smaller TensorTrain, or a number where no leg is left."""
        indices = parse_index("TensorTrain", index, self.shape)
        selected = [core[:, i] for core, i in zip(self.cores, indices, strict=True)]
        if slice not in map(type, indices) and self.exponent == 0 and self._resolved_entry < 1.0:
            number = functools.reduce(np.ndarray.dot, selected).item()
            if abs(number) >= self._resolved_entry:
                return self.dtype.type(number)
        cores, e = raw.contract_fixed_legs(selected)
        if cores[0].ndim == 2:
            return entry_of("TensorTrain", Scaled(cores[0], e + self.exponent), self.dtype)
        changed = {k for k, (i, n) in enumerate(zip(indices, self.shape, strict=True)) if not selects_all(i, n)}
        if not changed:
            return TensorTrain.from_sweep(selected, self.center, self.exponent)
        # Only the centre may change, or become a part of a neighbour, for all others to stay isometric.
        dropped = {k for k, i in enumerate(indices) if isinstance(i, int)}
        keeps = self.center is not None and changed <= {self.center} and dropped <= {self.center}
        center = min(self.center or 0, len(cores) - 1) if keeps else None
        return TensorTrain.from_sweep(cores, center, e + self.exponent).folded()

    @functools.cached_property
    def _resolved_entry(self) -> float:
        """Modulus of the smallest entry for which a plain product of its matrices is exact to roundoff.

        Numbers that underflow are below the smallest normal number, and are multiplied by at most the norms of the
        cores that follow. If the result is below 1, no product overflows.
        """
        growth = math.prod([max(1.0, norm(core)) for core in self.cores])
        return float(np.finfo(self.dtype).tiny / np.finfo(self.dtype).eps) * growth

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first leg, as numpy does."""
        return (self[k] for k in range(self.shape[0]))

    def _constant(self, number: Any) -> TensorTrain:
        ones = tuple(from_host(np.ones((1, n, 1), self.dtype), self.cores[0]) for n in self.shape)
        return TensorTrain(ones)._multiplied(number)


def check_bonds(name: str, cores: Sequence[Any]) -> None:
    """Raise where the bonds of cores do not fit together."""
    shapes = [tuple(core.shape) for core in cores]
    for k, (left, right) in enumerate(itertools.pairwise(shapes), 1):
        if left[-1] != right[0]:
            raise ArgumentError(
                f"{name}: bond {k} must have one size, got core {k - 1} of shape {left} and core {k} of shape {right}; "
                "the first leg of a core is its left bond, the last one its right bond."
            )
    ends = shapes[0][0], shapes[-1][-1]
    if ends != (1, 1):
        raise ArgumentError(
            f"{name}: the outer bonds must have size 1, got {ends[0]} and {ends[1]}; "
            "sum over them or move them into a core (cyclic trains are not supported)."
        )


def as_log_scale(name: str, log_scale: float) -> float:
    """Return the natural logarithm of a scale, small enough for its fraction to survive rounding."""
    value = as_real(name, "log_scale", log_scale, "a float")
    if not abs(value) <= _LOG_SCALE_LIMIT:  # NaN too
        raise ArgumentError(f"{name}: log_scale must lie between -1e12 and 1e12, got {value}; use zero cores for 0.")
    return value
