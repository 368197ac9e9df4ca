"""Linear layers whose weight is a TT-matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tnlib import TTMatrix
from tnlib_adapters.transformers_plugin.factored_linear import (
    Borrowed,
    FactoredLinear,
    Factors,
    Multiplications,
    contract,
    count,
    must_agree,
    refuse_inputs,
    shapes,
    tensors,
)


class TTLinear(FactoredLinear, formats=(TTMatrix,)):
    """W a TT-matrix: core k (r[k], m[k], n[k], r[k+1]) with input leg m[k] and output leg n[k]."""

    def __init__(self, factors: Factors | Borrowed) -> None:
        core_shapes = shapes(factors, *(f"core{k}" for k in range(count(factors, "core"))))
        must_agree(core_shapes[0][0], 1)
        for core, following in zip(core_shapes, [*core_shapes[1:], (1,)], strict=True):
            must_agree(core[3], following[0])
        features = (math.prod(s[1] for s in core_shapes), math.prod(s[2] for s in core_shapes))
        super().__init__(factors, features)

    @classmethod
    def of(cls, value: TTMatrix, inputs: Sequence[int] | None) -> TTLinear:
        """Return the layer of a TT-matrix."""
        refuse_inputs(value, inputs)
        share = float(np.exp(value.log_scale / len(value.cores)))
        return cls(tensors({f"core{k}": share * core for k, core in enumerate(value.cores)}))

    def product(self, x: Tensor) -> Tensor:
        """Return x W, from the first core to the last."""
        cores, t = self.parts("core"), x.reshape(-1, 1, 1, self.in_features)  # rows, written, bond, to be read
        for core in cores:
            r, m = core.shape[:2]
            t = t.reshape(*t.shape[:2], r, m, t.shape[3] // m)  # b w r m rest
            t = contract(t, core, (2, 3), (0, 1))  # b w [r m] rest, [r m] n r' -> b w rest n r'
            t = t.permute(0, 1, 3, 4, 2).flatten(1, 2)  # b (w n) r' rest
        return t.reshape(*x.shape[:-1], self.out_features)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the cores multiplied out."""
        first, *others = self.parts("core", dtype)
        w = first[0]  # m n r
        for core in others:
            w = contract(w, core, (2,), (0,))  # m n [r], [r] m' n' r' -> m n m' n' r'
            w = w.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (m m') (n n') r'
        return w[..., 0]

    def cost(self) -> Multiplications:
        """Return the multiplications of both loops."""
        per_row = forming = 0
        written, left, formed = 1, self.in_features, 1
        for k, (r, m, n, after) in enumerate(self.shapes_of("core")):
            per_row += written * left * r * n * after  # `left` counts the leg that is read here
            written, left = written * n, left // m
            forming += formed * r * m * n * after if k else 0
            formed *= m * n
        return Multiplications(per_row, forming)
