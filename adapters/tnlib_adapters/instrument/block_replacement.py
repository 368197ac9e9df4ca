"""One block of a running model, and how weights that stand for its own become its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tnlib._typing import Array
from tnlib_adapters.factors.module_factors import on_rows
from tnlib_adapters.factors.products import Products
from tnlib_adapters.factors.projections import Projections, join_modules
from tnlib_adapters.instrument.running_model import Layer, RunningModel, find_module


@dataclass(frozen=True)
class Block:
    """The k-th block of the model, run and given parameters by itself."""

    model: RunningModel
    k: int

    @property
    def layer(self) -> Layer:
        """The block and its projections."""
        return self.model.layers[self.k]

    def parameters(self, products: Products) -> dict[str, Tensor]:
        """Return the parameters of the block that hold products of tensors, named below the block."""
        attention = products.expand(self.model.sizes)
        found = self.of_attention(attention) if attention.weights else {}
        for name, weight in products.modules().items():
            module = find_module(self.model.model, name)
            found[f"{_name(self.layer.block, module)}.weight"] = on_rows(self.model.row, name, weight)
        return found

    def of_attention(self, projections: Projections) -> dict[str, Tensor]:
        """Return those that hold all four projections."""
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
    block = Block(model, k)
    tensors: Any = [
        {name: as_tensor(a) for name, a in one.items()} for one in (projections.weights, projections.biases)
    ]
    block.install(block.of_attention(Projections(*tensors)))


def as_tensor(values: Array) -> Tensor:
    """Return a copy in the precision of a running model."""
    return torch.from_numpy(np.array(values, np.float32))


def _name(block: nn.Module, module: nn.Module) -> str:
    return str(next(name for name, one in block.named_modules() if one is module))
