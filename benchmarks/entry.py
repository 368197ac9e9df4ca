"""One row of the registry, a function of some library and how it is called on a case; trains in their classes."""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cases import Case


def unchanged(x: Any, case: Case | None = None) -> Any:
    return x


@dataclass(frozen=True)
class Entry:
    """One way to solve a case.

    `run(function, x, case)` is what is timed. `exact`: its spectrum comes from LAPACK's SVD and not from the
    eigenvalues of a Gram matrix or a random sketch, so that small singular values are right as well.
    """

    name: str
    needs: str  # "package.module:function"; an entry whose function cannot be imported is skipped by name
    run: Callable[[Any, Any, Case], Any]
    arrays: Callable[[Any], Sequence[Any]]
    how: str  # the call; and a remark
    prepare: Callable[[Any, Case], Any] = unchanged
    exact: bool = False

    def function(self) -> Any:
        """Import what is timed; raises ImportError or AttributeError where it is missing."""
        return resolve(self.needs)

    def missing(self) -> str | None:
        """Why the entry cannot run here, or None."""
        try:
            self.function()
        except (ImportError, AttributeError):
            return f"{self.needs.replace(':', '.')} is not installed"
        return None

    def call(self, x: Any, case: Case) -> Any:
        """Run on prepared data, without the warnings: the true error says what there is to say."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.run(self.function(), x, case)

    def solve(self, x: Any, case: Case) -> list[np.ndarray]:
        """Prepare, run and take apart."""
        return self.as_arrays(self.call(self.prepare(x, case), case))

    def as_arrays(self, result: Any) -> list[np.ndarray]:
        """Take a result apart, into one of the layouts of truth.py."""
        return [np.asarray(a) for a in self.arrays(result)]


@functools.cache
def resolve(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pkgutil.resolve_name(name)


# trains in the classes of every library, and back to plain cores

SPLIT = "rtol / sqrt(d - 1)"


def to_torch(x: Any, _: Case) -> Any:
    torch = importlib.import_module("torch")
    torch.manual_seed(0)  # svd_lowrank takes no generator
    return torch.from_numpy(x)


def per_bond(case: Case) -> float:
    return (case.rtol or 0.0) / math.sqrt(len(case.shape) - 1)


def quimb_cores(state: Any) -> list[np.ndarray]:
    state.permute_arrays("lpr")
    first, *middle, last = state.arrays
    return [first[None], *middle, last[..., None]]


def tnlib_cores(fit: Any) -> list[np.ndarray]:
    *others, last = fit.value.cores
    return [*others, last * math.exp(fit.value.log_scale)]


def quimb_state(cores: Sequence[np.ndarray], _: Case) -> Any:
    states = resolve("quimb.tensor:MatrixProductState")
    return states([cores[0][0], *cores[1:-1], cores[-1][..., 0]], shape="lpr")  # three legs at the ends mean a ring


def torch_train(cores: Sequence[np.ndarray], case: Case) -> Any:
    return resolve("torchtt:TT")([to_torch(np.ascontiguousarray(core), case) for core in cores])
