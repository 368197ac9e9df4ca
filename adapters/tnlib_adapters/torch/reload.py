"""`AutoModel.from_pretrained` on a folder that `tnlib compress` wrote, through transformers' own registration.

transformers hands a checkpoint whose config names a quantization method to the quantizer registered for it, once
before the weights are loaded and once after. Here the first call puts parameters of the factors' shapes in the
place of the attention's weights, so that loading finds a home for every tensor; the second multiplies them out
into the modules that the model had. What comes out is an ordinary dense model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tnlib import FileFormatError
from tnlib_adapters.checkpoints.architectures import ARCHITECTURES, Architecture
from tnlib_adapters.checkpoints.factored import KEY, METHOD, Piece, descriptions, expand, held_biases
from tnlib_adapters.checkpoints.projections import Projections, Sizes, put_together, read_sizes


@register_quantization_config(METHOD)
class TnlibConfig(QuantizationConfigMixin):
    """The section of config.json that describes the factors of every layer."""

    def __init__(self, version: int, method: str, layers: list[list[dict[str, Any]]], **_: Any) -> None:
        self.quant_method: Any = METHOD
        self.version = version
        self.method = method
        self.layers = layers


class _Factors(nn.Module):
    """Homes for the factors of one layer while weights are loaded."""

    def __init__(self, described: list[dict[str, Any]], like: torch.Tensor) -> None:
        super().__init__()
        for piece in described:
            for part, shape in piece["shapes"].items():
                empty = torch.empty(shape, dtype=like.dtype, device=like.device)
                self.register_parameter(f"{piece['of']}_{part}", nn.Parameter(empty, requires_grad=False))


class _Bias(nn.Module):
    """A home for the bias of a projection whose weight is stored as factors."""

    def __init__(self, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))


class _SetAside(NamedTuple):
    attention: nn.Module
    modules: dict[str, Any]  # name below the attention module -> what stood there


@register_quantizer(METHOD)
class TnlibQuantizer(HfQuantizer):
    """Loads factors and multiplies them out."""

    requires_calibration = False
    quantization_config: TnlibConfig

    def __init__(self, quantization_config: TnlibConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._set_aside: list[_SetAside] = []

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        row, sizes = _row_and_sizes(model.config)
        for layer, described in enumerate(_described(self.quantization_config)):
            attention = _find(model, row.attention.format(layer=layer))
            weights = "".join(piece["of"] for piece in described)
            biases = "".join(held_biases(piece, sizes.d_model) for piece in described)
            modules: dict[str, Any] = {}
            for name, held in row.projections.items():
                if set(held) <= set(weights):
                    module: Any = attention.get_submodule(name)
                    modules[name] = module
                    _set_module(attention, name, _Bias(None if set(held) <= set(biases) else module.bias))
            like = next(iter(modules.values())).weight
            attention.add_module(METHOD, _Factors(described, like))
            # nothing is missing, whatever an architecture's own initialisation looks for in this module
            attention._is_hf_initialized = True  # type: ignore[assignment]
            self._set_aside.append(_SetAside(attention, modules))

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        row, sizes = _row_and_sizes(model.config)
        layers = _described(self.quantization_config)
        for layer, (described, aside) in enumerate(zip(layers, self._set_aside, strict=True)):
            factors = aside.attention.get_submodule(METHOD)
            found = expand([_piece(one, factors) for one in described], sizes)
            _restore(row, sizes, layer, found, aside)
            delattr(aside.attention, METHOD)
        self._set_aside.clear()
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]  # the model is dense now and is saved as such
        return model

    def is_serializable(self, *_: Any) -> bool:
        """Say that what was loaded can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Say that what was loaded can be trained."""
        return True


def _row_and_sizes(config: Any) -> tuple[Architecture, Sizes]:
    row, values = ARCHITECTURES[config.model_type], config.to_dict()
    return row, read_sizes(row, values, "config.json", "from_pretrained")


def _described(config: TnlibConfig) -> list[list[dict[str, Any]]]:
    """Return the pieces of every layer, checked as `open_checkpoint` checks them."""
    section = {"quant_method": METHOD, "version": config.version, "layers": config.layers}
    return descriptions({KEY: section}) or []


def _find(model: nn.Module, path: str) -> nn.Module:
    """Return the module at `path`, or at `path` below the base model of one with a head."""
    for name, module in model.named_modules():
        if name == path or name.endswith(f".{path}"):
            return cast(nn.Module, module)
    raise FileFormatError(
        f"from_pretrained: {type(model).__name__} must have a module {path!r}, found none; "
        "config.json belongs to another architecture."
    )


def _set_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


def _piece(described: Mapping[str, Any], factors: nn.Module) -> Piece:
    arrays = {
        part: factors.get_parameter(f"{described['of']}_{part}").detach().to("cpu", torch.float64).numpy()
        for part in described["shapes"]
    }
    return Piece.read(described, arrays)


def _restore(row: Architecture, sizes: Sizes, layer: int, found: Projections, aside: _SetAside) -> None:
    """Put the modules back with multiplied-out weights, and biases from wherever they were stored."""
    base = row.attention.format(layer=layer)
    tensors = put_together(row, sizes, "", layer, found)
    like = next(aside.attention.get_submodule(METHOD).parameters())
    for name, module in aside.modules.items():
        bias = cast(_Bias, aside.attention.get_submodule(name)).bias
        module.weight = _parameter(tensors[f"{base}.{name}.weight"], like)
        if f"{base}.{name}.bias" in tensors:
            module.bias = _parameter(tensors[f"{base}.{name}.bias"], like)
        elif bias is not None:
            module.bias = nn.Parameter(bias.detach())
        _set_module(aside.attention, name, module)


def _parameter(values: np.ndarray[Any, Any], like: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.ascontiguousarray(values)).to(like.device, like.dtype))
