"""Ranks of the weights of an adapter: one for all, or those that meet an error with the fewest numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tnlib._typing import Array


def equal_ranks(spectra: Mapping[str, Array], rank: int) -> dict[str, int]:
    """Return the same rank for all weights, or that of a smaller weight.

    >>> equal_ranks({"a": np.ones(3), "b": np.ones(1)}, 2)
    {'a': 2, 'b': 1}
    """
    return {name: min(rank, len(s)) for name, s in spectra.items()}


def ranks_within(spectra: Mapping[str, Array], costs: Mapping[str, int], discarded: float) -> dict[str, int]:
    """Return the ranks, at least 1, with which the squares of the discarded singular values sum to at most `discarded`.

    Singular values are kept in descending order of their square per stored number.

    Parameters
    ----------
    spectra
        Singular values of every weight, descending.
    costs
        Numbers that a rank of this weight stores.
    discarded
        Largest sum of squares.

    >>> ranks_within({"a": np.array([3.0, 1.0]), "b": np.array([2.0, 1.0])}, {"a": 1, "b": 1}, 1.0)
    {'a': 2, 'b': 1}
    """
    names = list(spectra)
    owner = np.concatenate([np.full(len(spectra[name]), k) for k, name in enumerate(names)])
    squares = np.concatenate([np.square(spectra[name], dtype=np.float64) for name in names])
    per_number = squares / np.array([costs[name] for name in names])[owner]
    order = np.argsort(-per_number, kind="stable")
    left = np.append(np.cumsum(squares[order][::-1])[::-1], 0.0)  # after 0, 1, ... singular values
    count = int(np.argmax(left <= discarded))
    ranks = np.bincount(owner[order[:count]], minlength=len(names))
    return {name: max(1, int(rank)) for name, rank in zip(names, ranks, strict=True)}
