"""One block of a running model with other weights: whole, or as factors that are applied one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tnlib._typing import Array
from tnlib_adapters.factors.projections import NAMES, Products, Projections, join_modules
from tnlib_adapters.instrument.block_passes import Call
from tnlib_adapters.instrument.running_model import RunningLayer, RunningModel, find_module


@dataclass(frozen=True)
class FactoredMap:
    """Affine map of a linear module, its weight as factors that act on rows."""

    factors: tuple[Tensor, ...]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output for x (..., in)."""
        product = reduce(torch.matmul, [factor.to(x) for factor in self.factors], x)
        return product if self.bias is None else product + self.bias.to(x)

    @property
    def requires_grad(self) -> bool:
        """True if gradients flow to a factor."""
        return any(factor.requires_grad for factor in self.factors)


Weights = Mapping[str, Tensor | FactoredMap]  # parameters of a block, and maps of linear modules, by name below


@dataclass(frozen=True)
class Block:
    """The k-th block of the model; runs alone, with its own or other weights."""

    model: RunningModel
    k: int

    @property
    def layer(self) -> RunningLayer:
        """The block and its projections."""
        return self.model.layers[self.k]

    @property
    def path(self) -> str:
        """Name of the block in the model."""
        return str(next(name for name, module in self.model.model.named_modules() if module is self.layer.block))

    def weights(self, products: Products) -> Weights:
        """Return the weights of the block for products of tensors.

        Of a model that fits in memory they are multiplied out. With the many weights and short batches of a large model
        that would take longer than the block itself: its factors are applied one after the other.
        """
        maps = {} if self.model.fits_in_memory else dict(self._maps(products))
        factors = {name: parts for name, parts in products.factors.items() if name not in maps}
        parameters = self.of_weights(replace(products, factors=factors).expand(self.model.sizes))
        return {self._name(self._module(name)): computation for name, computation in maps.items()} | parameters

    def of_weights(self, weights: Projections) -> dict[str, Tensor]:
        """Return the parameters of the block for weights (in, out): projections by letter, others by module.

        Modules of which not all projections are given keep their parameters.
        """
        wired, by_name = self.model.wiring.layers[self.k].attention, weights.weights
        linears = {letters: linear for letters, linear in wired.projections.items() if set(letters) <= by_name.keys()}
        attention = replace(wired, projections=linears)
        joined = join_modules(attention, weights, lambda parts, leg: torch.cat([*parts], leg))
        names = {linear.module: self._name(self._module(letters[0])) for letters, linear in linears.items()}
        parameters = dict[str, Tensor]()
        for stored, values in joined.items():
            module, _, kind = stored.rpartition(".")
            parameters[f"{names[module]}.{kind}"] = values
        for name in (name for name in by_name if name not in NAMES):
            matrix = self.model.wiring.matrices[name]
            parameters[f"{self._name(self._module(name))}.weight"] = matrix.on_rows(by_name[name])
        return parameters

    def _maps(self, products: Products) -> Iterator[tuple[str, FactoredMap]]:
        """Yield the weights that are products and alone in a linear module."""
        from transformers.pytorch_utils import Conv1D

        self.model.load(self.k)  # for the biases
        alone = self.model.wiring.layers[self.k].attention.projections
        for name, (first, *others) in products.factors.items():
            module: Any = self._module(name)
            if not others or type(module) not in (nn.Linear, Conv1D) or (name in NAMES and name not in alone):
                continue
            bias = products.biases.get(name, module.bias)
            if name in products.biased and name not in products.biases:  # in a row after the inputs, or 0
                n_in = self.model.sizes.d_model
                first, bias = first[:n_in], reduce(torch.matmul, others, first[n_in:]).sum(0)
            yield name, FactoredMap((first, *others), bias)

    def run(self, x: Tensor, call: Call, weights: Weights | None = None) -> Tensor:
        """Return the output of the block for input x and further call arguments, optionally with other weights."""
        self.model.load(self.k)
        args, kwargs = call
        values = dict(weights or {})
        maps = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        parameters = {name: value.to(self.model.dtype) for name, value in values.items() if isinstance(value, Tensor)}
        # gradients with respect to the input pass a block in which no weight is fitted too
        needed = x.requires_grad or any(value.requires_grad for value in values.values())
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed), self._computing(maps):
            out = functional_call(self.layer.block, parameters, (x.to(self.model.dtype), *args), kwargs)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def without(self, weights: Weights) -> AbstractContextManager[None]:
        """Free its own weights that these replace, inside."""
        names = [name if isinstance(value, Tensor) else f"{name}.weight" for name, value in weights.items()]
        return self.model.weights.without(self.k, [f"{self.path}.{name}" for name in names])

    @contextmanager
    def _computing(self, computations: Mapping[str, FactoredMap]) -> Iterator[None]:
        """Let modules compute these inside."""
        modules: list[Any] = [self.layer.block.get_submodule(name) for name in computations]
        for module, computation in zip(modules, computations.values(), strict=True):
            module.forward = computation
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    def _module(self, name: str) -> nn.Module:
        """Return the module of a projection, or of another weight."""
        return self.layer.projections[name].module if name in NAMES else find_module(self.model.model, name)

    def _name(self, module: nn.Module) -> str:
        """Return the name of a module below the block."""
        return str(next(name for name, candidate in self.layer.block.named_modules() if candidate is module))


def as_tensor(values: Array, device: torch.device) -> Tensor:
    """Return a copy in float32 on a device, with rows one after the other: products round differently by the order."""
    return torch.from_numpy(np.array(values, np.float32, order="C")).to(device)


def as_array(tensor: Tensor) -> Array:
    """Return a tensor of any device as an array; one on the host is not copied."""
    array: Array = tensor.cpu().numpy()
    return array


def in_double_precision(x: Tensor) -> Tensor:
    """Return x in double precision, on the host if its device has none."""
    return x.cpu().double() if x.device.type == "mps" else x.double()
