r"""Contributions to a logit by the number of layers on a path, of a frozen model of any architecture.

A readout of the final stream is pulled back as in `logit_paths`, apart by the number k of counted layers that its paths
pass. With N the norm behind a block and K_l the linear parts of its layers,

    r_k -> N^T r_k + sum_(l not counted) K_l^T N^T r_k + sum_(l counted) K_l^T N^T r_(k-1).

The part of order k is <r_k, embedding> where r_k reaches the embedding, and that of every bias and remainder where it
is added. The parts of all orders sum to the logit; there are 2^L paths of L layers, and L + 1 readouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import check_choice
from tnlib_adapters.circuits.paths.logit_paths import LogitContributions
from tnlib_adapters.frozen.frozen_heads import FrozenHeads, pull_back
from tnlib_adapters.result_table import Columns, Table

Counted = Literal["heads", "all"]
LAYERS = {"heads": "attention layers", "all": "attention and feed-forward layers"}  # that are counted, in words


@dataclass(frozen=True, eq=False, repr=False)
class PathOrders(Table):
    """Parts of a logit, or of another readout, by the number of layers on a path, returned by `path_orders`.

    Parameters
    ----------
    embedding
        (L + 1,): from the embedding, through 0, 1, ..., L counted layers.
    sources
        (L + 1,): from biases and from the remainders of feed-forward layers, by the counted layers behind them.
    counted
        "heads" or "all".

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), path expansion.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.circuits import logit_contributions
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> frozen = tnlib_adapters.freeze(model, [5, 6, 7, 8, 5, 6])
    >>> found = path_orders(logit_contributions(frozen, 7))
    >>> found.values.round(1), f"{found.total:.2f}"
    (array([-0.3,  3.4, -1.4]), '1.68')
    """

    embedding: Array
    sources: Array
    counted: Counted

    @property
    def values(self) -> Array:
        """(L + 1,): both together; they sum to the logit."""
        return np.asarray(self.embedding + self.sources)

    @property
    def total(self) -> float:
        """The logit of the model, or the readout."""
        return float(self.values.sum())

    @property
    def within(self) -> Array:
        """(L + 1,): the sum of all parts up to an order."""
        return np.cumsum(self.values)

    def order_within(self, rtol: float) -> int:
        """Return the smallest order from which on the sum stays within `rtol` of the total."""
        return order_within(self.within, rtol * abs(self.total))

    @property
    def _title(self) -> str:
        return f"PathOrders, {self.total:.3f} by the number of {LAYERS[self.counted]} on a path"

    def _columns(self, rows: Any) -> Columns:
        return {"order": np.arange(len(self.values))[rows], "part": self.values[rows], "sum": self.within[rows]}

    def _printed(self) -> slice:
        return slice(0, min(len(self.values), self.order_within(1e-3) + 1))

    def _notes(self) -> list[str]:
        return [f"within 1 % from order {self.order_within(0.01)} on; largest part {np.abs(self.values).max():.3f}"]

    def _picture(self) -> str:
        label = "parts by order, above, and their sums up to an order, below"
        return heat_image(np.stack([self.values, self.within]), label, width=320)


def order_within(sums: Array, atol: float) -> int:
    """Return the smallest order from which on the sums (L + 1,) stay within `atol` of the last one."""
    off = np.flatnonzero(np.abs(sums - sums[-1]) > atol)
    return int(off[-1]) + 1 if len(off) else 0


def path_orders(contributions: LogitContributions, counted: Counted = "heads") -> PathOrders:
    """Return the parts of a logit by the number of layers on a path, exactly.

    Parameters
    ----------
    contributions
        What `logit_contributions` returned, of a token or of any direction such as a difference of logits.
    counted
        "heads": attention layers count, and feed-forward layers are part of what lies between them. "all": both count.
        The linear maps of feed-forward layers are those of `freeze`.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), path expansion.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.circuits import logit_contributions
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = logit_contributions(tnlib_adapters.freeze(llama, [5, 6, 7, 8]), 9)
    >>> orders = path_orders(found)
    >>> len(orders.values), bool(np.isclose(orders.total, found.total))
    (5, True)
    """
    check_choice("path_orders", "counted", counted, get_args(Counted))
    model = contributions.model
    readouts, of_norm = pull_back(model.final_norm, contributions.readout[None])  # orders n d
    sources = [np.array([contributions.bias]), of_norm]
    for block in reversed(model.blocks):
        readouts, of_norm = pull_back(block.after, readouts)
        sources.append(of_norm)
        passed = np.zeros_like(readouts)  # through a layer that is not counted
        counted_once = np.zeros_like(readouts)
        for branch in block.branches:
            target = counted_once if counted == "all" or isinstance(branch, FrozenHeads) else passed
            pulled, of_biases = branch.pull_back(readouts)
            target += pulled
            sources.append(of_biases)
            if branch.remainder is not None:
                sources.append((readouts * branch.remainder).sum(axis=(1, 2)))
        readouts = readouts + passed
        if counted_once.any():
            readouts = np.concatenate([readouts, np.zeros_like(readouts[:1])])
            readouts[1:] += counted_once
    of_embedding = np.asarray((readouts * model.embedding).sum(axis=(1, 2)), np.float64)
    total = np.zeros(len(readouts))
    for part in sources:
        total[: len(part)] += part
    return PathOrders(of_embedding, total, counted)
