"""The Gamma-Lambda form of a train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._format import Format
from tnlib._stored_arrays import as_stored_list, set_fields
from tnlib._typing import Array
from tnlib.formats.train.cores import find_center
from tnlib.formats.train.format import TensorTrain, as_log_scale
from tnlib.formats.train.tt_matrix import as_train
from tnlib.formats.train.tt_rounding import schmidt_form
from tnlib.linalg.scaling import shift, split_exponential
from tnlib.linalg.threads import single_threaded_blas


@dataclass(frozen=True, eq=False, repr=False)
class Vidal(Format):
    r"""A train with its Schmidt values on the bonds, in the canonical form of Vidal.

    .. math:: e^c \Gamma_0 \Lambda_0 \Gamma_1 \Lambda_1 \cdots \Lambda_{d-2} \Gamma_{d-1}

    Parameters
    ----------
    gammas
        Core :math:`\Gamma_k` of shape (r[k], n[k], r[k+1]), r[0] = r[d] = 1. :math:`\Lambda_{k-1} \Gamma_k` is
        left-isometric, :math:`\Gamma_k \Lambda_k` right-isometric.
    lambdas
        The Schmidt values of bond k + 1, (r[k+1],), descending and of norm 1: the diagonal of :math:`\Lambda_k`.
    log_scale
        Natural logarithm c of the Frobenius norm: :math:`e^c` times the lambdas are the singular values.

    References
    ----------
    G. Vidal, "Efficient classical simulation of slightly entangled quantum computations", Phys. Rev. Lett. 91 (2003).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> bell = tnlib.tt_svd(np.eye(2) / np.sqrt(2)).value
    >>> f"{tnlib.vidal(bell).lambdas[0][1]:.4f}"
    '0.7071'
    """

    gammas: Sequence[Array]
    lambdas: Sequence[Array]
    log_scale: float = 0.0

    def __post_init__(self) -> None:
        gammas = as_stored_list("Vidal", "gamma", self.gammas, ndim=3)
        lambdas = as_stored_list("Vidal", "lambda", self.lambdas, ndim=1) if len(gammas) > 1 else ()
        sizes = [1, *(len(s) for s in lambdas), 1]
        if len(lambdas) != len(gammas) - 1 or any(
            (g.shape[0], g.shape[-1]) != (sizes[k], sizes[k + 1]) for k, g in enumerate(gammas)
        ):
            raise ArgumentError(
                f"Vidal: lambdas must have the sizes of the bonds between gammas, got {sizes[1:-1]} and gammas of "
                f"shapes {[g.shape for g in gammas]}; one lambda lies between two gammas."
            )
        for k, s in enumerate(lambdas):
            if np.iscomplexobj(s) or not (s > 0).all():
                raise ArgumentError(f"Vidal: lambda {k} must be positive, got {s.min()}; leave out what is zero.")
        set_fields(self, gammas=gammas, lambdas=lambdas, log_scale=as_log_scale("Vidal", self.log_scale))

    def attributes(self) -> dict[str, Any]:
        """Return the scale."""
        return {"log_scale": self.log_scale}

    def gauge_error(self) -> str | None:
        """Return which gamma or lambda is not as in the form."""
        for k, s in enumerate(self.lambdas):
            if (np.diff(s) > 0).any() or abs(np.linalg.norm(s) - 1) > 1e4 * np.finfo(s.dtype).eps:
                return f"lambda {k} must be descending and of norm 1, and is not"
        last = len(self.gammas) - 1
        rights = [g * s for g, s in zip(self.gammas, self.lambdas, strict=False)] + [self.gammas[-1]]
        for cores, center in ((self.train().cores, last), (rights, 0)):
            if find_center(cores, center) != center:
                return f"gammas must be isometric with the lambda on their {'left' if center else 'right'}, and are not"
        return None

    def _dtype_of(self, name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.zeros(0, dtype).real.dtype if name.startswith("lambdas") else dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the outer legs."""
        return tuple(gamma.shape[1] for gamma in self.gammas)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All d + 1 bond sizes (r[0], ..., r[d])."""
        return (1, *(gamma.shape[-1] for gamma in self.gammas))

    def train(self) -> TensorTrain:
        """Return the left-canonical train: each lambda goes into the gamma on its right."""
        first, *others = self.gammas
        cores = [first, *(s[:, None, None] * gamma for s, gamma in zip(self.lambdas, others, strict=True))]
        return TensorTrain(cores, len(cores) - 1, self.log_scale)

    def _part(self, *, imaginary: bool) -> Vidal:
        """Return the form of the real or imaginary part, at its numerical ranks."""
        return vidal(self.train()._part(imaginary=imaginary))

    def full(self) -> Array:
        """Contract to the dense array (n[0], ..., n[d-1])."""
        return self.train().full()

    def norm(self) -> float:
        """Frobenius norm."""
        return self.train().norm()


@single_threaded_blas
def vidal(tt: TensorTrain) -> Vidal:
    """Return the Gamma-Lambda form of `tt`, with its numerical ranks.

    The form is unique up to the basis of equal Schmidt values, which is fixed.

    References
    ----------
    G. Vidal, "Efficient classical simulation of slightly entangled quantum computations", Phys. Rev. Lett. 91 (2003).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> form = tnlib.vidal(tnlib.tt_svd(np.diag([4.0, 3.0])).value)
    >>> form.lambdas[0], f"{np.exp(form.log_scale):.1f}"
    (array([0.8, 0.6]), '5.0')
    """
    as_train("vidal", "tt", tt, TensorTrain)
    train, spectra = schmidt_form(tt, diagonal=True)
    lambdas = [s / (np.linalg.norm(s) or 1) if s[0] > 0 else np.ones_like(s) for s in spectra]
    first, *others = train.cores
    gammas = [first, *(core / s[:, None, None] for core, s in zip(others, lambdas, strict=True))]
    log_scale = train.log_norm()
    if log_scale == -math.inf:  # the zero tensor
        log_scale = train.exponent * math.log(2)
    exponent, factor = split_exponential(log_scale)  # with the rounding of log_scale, which the last gamma compensates
    gammas[-1] = shift(gammas[-1] / gammas[-1].real.dtype.type(factor), train.exponent - exponent)
    return Vidal(gammas, lambdas, log_scale)
