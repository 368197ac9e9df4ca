r"""Virtual induction head built from delta tensors: shift by one token, match, copy.

    scores_ij = x_i . Match . (Shift x)_j / sqrt(d)        pattern = softmax(scores), causal       out = pattern x Copy

Shift_jk = delta_(k, j - 1) is the pattern of a previous-token head in layer 1; Match and Copy are identities. Keys hold
the preceding token, so position i attends to the tokens that followed earlier occurrences of x_i, and copies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import tnlib
from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.interop import quimb
from tnlib_adapters.reference.layers import softmax


@dataclass(frozen=True, eq=False, repr=False)
class ToyInduction:
    """A virtual induction head on a sequence of vectors, returned by `toy_induction`.

    Parameters
    ----------
    network
        quimb TensorNetwork of the scores, open indices "query" and "key", tensors X, MATCH, X, SHIFT.
    pattern
        (n, n): causal attention weights.
    head
        The frozen head, pattern (x) Copy, again a delta in the features.
    output
        (n, d): output of the head.
    """

    network: Any
    pattern: Array
    head: tnlib.KroneckerTerms
    output: Array

    def __repr__(self) -> str:
        n, d = self.output.shape
        return f"ToyInduction({n} positions x {d} features, scores of {self.network.num_tensors} tensors)"


def toy_induction(x: Array) -> ToyInduction:
    """Return a virtual induction head of delta tensors, applied to a sequence of vectors.

    Parameters
    ----------
    x
        (n, d), real, one row per token; equal tokens have equal rows. Random rows with d entries of unit variance are
        sufficiently distinct.

    Returns
    -------
    ToyInduction
        The network of its scores, its pattern, and its output.

    Raises
    ------
    ArgumentError
        If `x` is not a real matrix.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Induction heads".

    Examples
    --------
    Ten random vectors, twice; every position of the second half attends to the successor of its first occurrence:

    >>> import numpy as np
    >>> x = np.tile(np.random.default_rng(0).standard_normal((10, 64)), (2, 1))
    >>> toy = toy_induction(x)
    >>> toy.pattern[10:].argmax(axis=1)
    array([ 1,  2,  3,  4,  5,  6,  7,  8,  9, 10])
    """
    x = as_array("toy_induction", "x", x, ndim=2)
    if np.iscomplexobj(x):
        raise ArgumentError(f"toy_induction: x must be real, got {x.dtype}; pass real vectors.")
    import quimb.tensor as qtn

    n, d = x.shape
    shift, match, copy = np.eye(n, k=-1), np.eye(d), np.eye(d)
    queries = qtn.Tensor(x, ("query", "a"), tags="X")
    keys = qtn.Tensor(shift, ("key", "before"), tags="SHIFT") & qtn.Tensor(x, ("before", "b"), tags="X")
    scores = queries & qtn.Tensor(match, ("a", "b"), tags="MATCH") & keys
    s = quimb.contract(scores, legs=("query", "key")) / np.sqrt(d)  # query key [a b before]
    pattern = softmax(np.where(np.tri(n, dtype=bool), s, -np.inf))
    head = tnlib.KroneckerTerms(pattern[None], [copy])
    return ToyInduction(scores, pattern, head, head.apply(x))
