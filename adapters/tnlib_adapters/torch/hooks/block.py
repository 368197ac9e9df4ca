"""One block of a running model, and how factors of its attention become its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tnlib_adapters.checkpoints.products import Products
from tnlib_adapters.checkpoints.projections import NAMES, Projections, join_modules, n_out
from tnlib_adapters.torch.hooks.running import Layer, RunningModel

Factors = dict[str, list[Tensor]]  # of a projection, and of "b", the output bias


@dataclass(frozen=True)
class Block:
    """One block of the model, and how factors become its parameters."""

    model: RunningModel
    k: int
    biased: frozenset[str]

    @property
    def layer(self) -> Layer:
        """The block and its projections."""
        return self.model.layers[self.k]

    def parameters(self, factors: Factors) -> dict[str, Tensor]:
        """Return the parameters of the block's attention, named below the block."""
        sizes, weights, biases = self.model.sizes, {}, {}
        for name in NAMES:
            whole = reduce(torch.matmul, factors[name])
            n_in = sizes.widths["o"] if name == "o" else sizes.d_model
            weights[name] = whole[:n_in]
            if name in self.biased:
                biases[name] = whole[n_in] if len(whole) > n_in else whole.new_zeros(n_out(sizes, name))
        biases |= {"o": factors["b"][0]} if "b" in factors else {}
        return self.stored(Projections(cast(Any, weights), cast(Any, biases)))

    def stored(self, projections: Projections) -> dict[str, Tensor]:
        """Return the parameters that hold projections of tensors."""
        row, sizes, layer = self.model.row, self.model.sizes, self.layer
        joined = join_modules(row, sizes, "", self.k, projections, lambda parts, leg: torch.cat([*parts], leg))
        base, found = row.attention.format(layer=self.k), {}
        for part, held in row.projections.items():
            module = layer.projections[held[0]].module
            for kind in ("weight", "bias"):
                if f"{base}.{part}.{kind}" in joined:
                    found[f"{_name(layer.block, module)}.{kind}"] = joined[f"{base}.{part}.{kind}"]
        return found

    def run(
        self, x: Tensor, call: tuple[tuple[Any, ...], dict[str, Any]], parameters: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return what the block writes, called with x and whatever else; with these parameters if there are any."""
        args, kwargs = call
        moving = parameters is not None and any(t.requires_grad for t in parameters.values())
        with torch.set_grad_enabled(moving):
            out = functional_call(self.layer.block, dict(parameters or {}), (x, *args), kwargs)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def install(self, parameters: Mapping[str, Tensor]) -> None:
        """Let the model have these parameters."""
        with torch.no_grad():
            for name, value in parameters.items():
                self.layer.block.get_parameter(name).copy_(value)


def install(model: RunningModel, k: int, projections: Projections) -> None:
    """Put projections into the k-th layer of a running model."""
    block = Block(model, k, frozenset(projections.biases))
    weights = {name: _tensor(one) for name, one in projections.weights.items()}
    biases = {name: _tensor(one) for name, one in projections.biases.items()}
    block.install(block.stored(Projections(cast(Any, weights), cast(Any, biases))))


def factors_of(products: Products) -> Factors:
    """Return the factors of a layer as tensors."""
    found = {name: [_tensor(one) for one in products.factors[name]] for name in NAMES}
    return found | ({} if products.output_bias is None else {"b": [_tensor(products.output_bias)]})


def products_of(factors: Factors, like: Products) -> Products:
    """Undo `factors_of`."""
    arrays = {name: tuple(one.numpy().astype(np.float64) for one in held) for name, held in factors.items()}
    (bias,) = arrays.pop("b", (None,))
    return Products(arrays, like.biased, bias)


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32))


def _name(block: nn.Module, module: nn.Module) -> str:
    return str(next(name for name, one in block.named_modules() if one is module))
