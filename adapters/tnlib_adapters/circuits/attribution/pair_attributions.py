"""A number as a sum over pairs of a writer of the query and a writer of the key, and one score by singular vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib_adapters.circuits.attribution.query_key_factors import ScoreForm
from tnlib_adapters.result_table import Columns, Table, descending

_SHOWN = 6  # rows of a printed table

PairRow = tuple[str, str, float]  # writer of the query, writer of the key, contribution


@dataclass(frozen=True, eq=False, repr=False)
class PairAttribution(Table):
    """A score of a head, or a sum of scores, by writer of the query and writer of the key.

    Parameters
    ----------
    title
        Head and positions.
    names
        Writers of the stream: "tokens", "positions", heads "0.3", "0.bias", "mlp 0"; "bias" for biases of queries and
        keys and of the norm before them.
    pairs
        (writers, writers): contribution of a writer of the query with a writer of the key.
    offset
        What the distance adds: ALiBi or a relative bias.
    """

    title: str
    names: tuple[str, ...]
    pairs: Array
    offset: float

    @property
    def total(self) -> float:
        """The score, which is the sum of all pairs and of the offset."""
        return float(self.pairs.sum()) + self.offset

    @property
    def _title(self) -> str:
        return f"{self.title}: {self.total:.3f}"

    def _columns(self, rows: Any) -> Columns:
        queries, keys, contributions = zip(*self.top(self.pairs.size)[rows], strict=True)
        return {"query": queries, "key": keys, "contribution": contributions}

    def _printed(self) -> slice:
        return slice(_SHOWN)

    def _notes(self) -> list[str]:
        others = self.total - sum(value for *_, value in self.top(_SHOWN))
        return [f"all others {others:.3f}" + (f", of them {self.offset:.3f} by the distance" if self.offset else "")]

    def _picture(self) -> str:
        return heat_image(self.pairs, "contributions; writers of the query as rows, of the key as columns", width=160)

    def top(self, count: int = 10) -> list[PairRow]:
        """Return the pairs of the largest modulus as rows (writer of the query, writer of the key, contribution)."""
        n = len(self.names)
        largest = descending(np.abs(self.pairs), as_count("PairAttribution.top", "count", count))
        return [(self.names[at // n], self.names[at % n], float(self.pairs.flat[at])) for at in largest]


@dataclass(frozen=True, eq=False, repr=False)
class ScoreAttribution(PairAttribution):
    """One score of a head by pairs of writers, and further by singular component of its form.

    Parameters
    ----------
    head
        (layer, head).
    query, key
        Positions.
    weight
        The attention weight of the model.
    form
        Bilinear form of the score at these positions.
    inputs
        (2, writers, d_model + 1): what the writers add to the input of the layer at the two positions, and the
        constant coordinate.
    """

    head: tuple[int, int]
    query: int
    key: int
    weight: float
    form: ScoreForm
    inputs: Array

    def components(self) -> tuple[Array, Array]:
        """Return the pairs by singular component of the form, (components, writers, writers), and its singular values.

        The form is U S V^T at these positions, with rotations, scale and divisors of norms of heads; a component is
        s_c <x_i, u_c> <v_c, x_j>. The sum over components is `pairs`.
        """
        (q_basis, q), (k_basis, k) = (np.linalg.qr(side) for side in (self.form.query, self.form.key))
        u, s, vh = np.linalg.svd(self.form.scale * q @ k.T)
        left, right = self.inputs[0] @ q_basis @ u, self.inputs[1] @ k_basis @ vh.T  # writer [d~] c
        return np.einsum("pc,c,qc->cpq", left, s, right), s
