"""Random trains, states of one charge, and their dense arrays, for the adapters of physics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracles
from hypothesis import strategies as st

import tnlib


@st.composite
def operators(draw: Any, square: bool = False) -> tnlib.TTMatrix:
    """Any operator of one dtype, its rows and columns of different sizes unless `square`."""
    rows = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    columns = rows if square else [draw(st.integers(1, 3)) for _ in rows]
    ranks = [1, *(draw(st.integers(1, 3)) for _ in rows[1:]), 1]
    dtype, seed = draw(st.sampled_from(oracles.DTYPES)), draw(st.integers(0, 999))
    shapes = zip(ranks, rows, columns, ranks[1:], strict=False)
    cores = [oracles.normal(shape, dtype, seed + k) for k, shape in enumerate(shapes)]
    return tnlib.TTMatrix(cores, None, draw(st.sampled_from([0.0, 2.0])))


def of_one_charge(charges: Sequence[Sequence[int]], total: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """A random dense state whose legs' charges add up to `total` wherever it is not zero."""
    x = oracles.normal([len(leg) for leg in charges], dtype, seed)
    for entry in itertools.product(*(range(len(leg)) for leg in charges)):
        if sum(leg[i] for leg, i in zip(charges, entry, strict=True)) != total:
            x[entry] = 0
    return x


def turned_inside(train: tnlib.TensorTrain, seed: int = 0) -> tnlib.TensorTrain:
    """The same train with a random unitary and its inverse on every bond: no basis minds any charge."""
    cores = [core.copy() for core in train.cores]
    for k in range(1, len(cores)):
        u = oracles.isometry(len(cores[k]), len(cores[k]), train.dtype, seed + k).astype(train.dtype)
        cores[k - 1] = np.einsum("lnr,rs->lns", cores[k - 1], u)
        cores[k] = np.einsum("rs,rnt->snt", u.conj(), cores[k])
    return tnlib.TensorTrain(cores, train.center, train.log_scale)
