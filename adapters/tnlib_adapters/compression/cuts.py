"""Where the heads of a layer can be cut: components, those that stand or fall together, and heads that share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.compression.moments import KINDS, Moments


@dataclass(frozen=True)
class Cut:
    """The components of one kind of operator in all heads of a layer.

    Parameters
    ----------
    left, right
        (heads, d_head, d_head), component c is left[h][:, c] right[h][:, c]^T; all of them together are the identity.
    units
        Components that stay or go together.
    group
        How many query heads share a key and value head, and so what they keep.
    in_place
        Whether a component that stays keeps its place in the head, because it turns by a frequency of its own.
    """

    left: Array
    right: Array
    units: tuple[tuple[int, ...], ...]
    group: int
    in_place: bool

    def slopes(self, on_left: Array, on_right: Array) -> Array:
        """Return the derivatives by a gate on every unit, (probes, texts, key heads, units).

        Activations of shape (texts, tokens, heads, d_head), their gradients (probes, the same).
        """
        a, p = np.moveaxis(on_left, 1, 3), np.moveaxis(on_right, 3, 2)  # b h d t, p b h t d'
        both = a @ p  # b h d [t], p b h [t] d' -> p b h d d'
        single = np.sum(self.left.astype(a.dtype) * (both @ self.right.astype(a.dtype)), axis=3)  # p b h [d] c
        shared: Array = single.reshape(*single.shape[:2], -1, self.group, single.shape[3]).sum(3)  # p b g [head of g] c
        return np.stack([shared[..., list(unit)].sum(-1) for unit in self.units], axis=-1)


def cuts_of(moments: Moments, group: int, rotary: Rotary | None) -> dict[str, Cut]:
    """Return where both kinds of operators of a layer can be cut.

    Under rotary embeddings only whole planes can go from queries and keys, and columns that do not turn.
    """
    found = {}
    for kind in KINDS:
        left, right = moments.components(kind, group)
        d_head = left.shape[1]
        if kind == "qk" and rotary is not None:
            same = np.broadcast_to(np.eye(d_head), left.shape)
            planes = tuple(zip(*(side.tolist() for side in rotary.planes), strict=True))
            others = tuple((column,) for column in range(rotary.n_columns, d_head))
            found[kind] = Cut(same, same, planes + others, group, True)
        else:
            found[kind] = Cut(left, right, tuple((c,) for c in range(d_head)), group, False)
    return found
