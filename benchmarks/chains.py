"""Trains in the classes of every library, and back to plain cores."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.entry import resolve

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
