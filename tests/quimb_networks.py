"""Networks of quimb for tests: every format with its dense array, and networks from strings of letters."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from hypothesis import strategies as st
from oracles import ALL_FORMATS, format_id

import tnlib

VIDALS = [
    tnlib.vidal(tnlib.TensorTrain(oracles.random_cores((2, 3, 2, 4), (1, 2, 5, 3, 1), dtype), log_scale=0.75))
    for dtype in oracles.DTYPES
] + [tnlib.vidal(tnlib.TensorTrain([np.ones((1, 3, 1))]))]
EVERY_FORMAT = [*ALL_FORMATS, *VIDALS]
every_format = pytest.mark.parametrize("value", EVERY_FORMAT, ids=format_id)

SIZES = dict(zip("abcdefgh", (2, 3, 2, 4, 3, 2, 1, 3), strict=True))


def dense(value: Any) -> np.ndarray:
    """The array whose legs a network of `value` has open, an operator's rows before its columns."""
    full = oracles.contract(value.train() if isinstance(value, tnlib.Vidal) else value)
    match value:
        case tnlib.TTMatrix():
            return full.reshape(*value.row_shape, *value.col_shape)
        case tnlib.KroneckerTerms():
            (_, p, p_in), (q, q_in) = value.left.shape, value.right[0].shape
            return full.reshape(p, q, p_in, q_in)
    return full


def build(terms: list[str], dtype: Any = np.float64, seed: int = 0, sizes: dict[str, int] = SIZES) -> Any:
    """A network of normal tensors T0, T1, ... with one letter per index."""
    arrays = [oracles.normal([sizes[i] for i in inds], dtype, seed + k) for k, inds in enumerate(terms)]
    pairs = zip(arrays, terms, strict=True)
    return qtn.TensorNetwork([qtn.Tensor(a, list(inds), [f"T{k}"]) for k, (a, inds) in enumerate(pairs)])


def by_einsum(tn: Any, legs: str) -> np.ndarray:
    """The contraction of `tn` by numpy."""
    terms = ",".join("".join(tensor.inds) for tensor in tn)
    return np.einsum(f"{terms}->{legs}", *(tensor.data for tensor in tn))


@st.composite
def networks(draw: Any) -> tuple[list[str], str]:
    letters = draw(st.permutations("abcdefgh"))[: draw(st.integers(1, 6))]
    terms = draw(st.lists(st.lists(st.sampled_from(letters), max_size=3, unique=True), min_size=1, max_size=6))
    terms = ["".join(term) for term in terms]
    there = sorted(set("".join(terms)))
    legs = draw(st.lists(st.sampled_from(there), unique=True, max_size=4)) if there else []
    return terms, "".join(legs)
