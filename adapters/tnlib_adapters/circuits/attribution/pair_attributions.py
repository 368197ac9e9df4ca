"""A number as a sum over pairs of a writer of the query and a writer of the key, and one score by singular vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._html import facts, heat_image, table
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib_adapters.circuits.attribution.query_key_factors import ScoreForm
from tnlib_adapters.circuits.data_frames import data_frame

_SHOWN = 6  # rows of a printed table

PairRow = tuple[str, str, float]  # writer of the query, writer of the key, contribution


@dataclass(frozen=True, eq=False, repr=False)
class PairAttribution:
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

    def top(self, count: int = 10) -> list[PairRow]:
        """Return the pairs of the largest modulus as rows (writer of the query, writer of the key, contribution)."""
        n = len(self.names)
        largest = np.argsort(-np.abs(self.pairs).ravel(), kind="stable")
        largest = largest[: as_count("PairAttribution.top", "count", count)]
        return [(self.names[at // n], self.names[at % n], float(self.pairs.flat[at])) for at in largest]

    def __repr__(self) -> str:
        rows = self.top(_SHOWN)
        width = max(len(name) for row in rows for name in row[:2]) + 2
        lines = [f"  {a:{width}}{b:{width}}{value:9.3f}" for a, b, value in rows]
        others = self.total - sum(value for *_, value in rows)
        head = f"{self.title}: {self.total:.3f}"
        return "\n".join([head, f"  {'query':{width}}key", *lines, f"  {'all others':{2 * width}}{others:9.3f}"])

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame of all pairs, largest modulus first: query, key, contribution.

        Raises
        ------
        ModuleNotFoundError
            If pandas is not installed.
        """
        queries, keys, contributions = zip(*self.top(self.pairs.size), strict=True)
        columns = {"query": queries, "key": keys, "contribution": contributions}
        return data_frame("PairAttribution.to_frame", columns)

    def _repr_html_(self) -> str:
        rows = [[query, key, f"{value:.3f}"] for query, key, value in self.top(_SHOWN)]
        label = "contributions; writers of the query as rows, of the key as columns"
        parts = table(["query", "key", "contribution"], rows) + heat_image(self.pairs, label, width=160)
        return facts(f"{self.title}: {self.total:.3f}", {"offset": f"{self.offset:.3f}"}, parts)


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
