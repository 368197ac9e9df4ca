"""`AutoModel.from_pretrained` on a folder that `tnlib compress` wrote, through transformers' own registration.

transformers hands a checkpoint whose config names a quantization method to the quantizer registered for it, once
before the weights are loaded and once after. Here the first call puts layers that hold factors in the place of the
attention's projections. The factors are parameters of one module below the attention, under the names they have in
the files, so that loading finds a home for every tensor and `save_pretrained` writes the same again.
`model.dequantize()` makes an ordinary dense model.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tnlib import FileFormatError
from tnlib_adapters.architectures.table import ARCHITECTURES, Architecture
from tnlib_adapters.attention.loaded_module import in_memory
from tnlib_adapters.factors.attention_factors import KEY, METHOD, descriptions, held_biases
from tnlib_adapters.factors.module_factors import MODULES, described_modules
from tnlib_adapters.factors.projections import Sizes, read_sizes
from tnlib_adapters.transformers_plugin.attention_layers import LayerFactors, SideBySide, build
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, no_numbers
from tnlib_adapters.transformers_plugin.module_layers import FactoredEmbedding, factored_module


@register_quantization_config(METHOD)
class TnlibConfig(QuantizationConfigMixin):
    """The section of config.json that describes the factors of every layer."""

    def __init__(
        self,
        version: int,
        method: str,
        layers: list[list[dict[str, Any]]],
        modules: dict[str, dict[str, Any]] | None = None,
        **_: Any,
    ) -> None:
        self.quant_method: Any = METHOD
        self.version = version
        self.method = method
        self.layers = layers
        if modules:
            self.modules = modules


@register_quantizer(METHOD)
class TnlibQuantizer(HfQuantizer):
    """Puts layers that hold factors in the place of those that held weights."""

    requires_calibration = False
    quantization_config: TnlibConfig

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        for layer in _layers(model, self.quantization_config):
            modules = layer.projections()
            originals = {name: cast(Any, layer.attention.get_submodule(name)) for name in modules}
            home = LayerFactors(layer.described, next(iter(originals.values())).weight)
            layer.attention.add_module(METHOD, home)
            for name, held in modules.items():
                made = build(layer.described, held, home, layer.sizes, layer.row.fused)
                if not layer.holds_bias_of(held):
                    made.bias = originals[name].bias
                made.register_parameter("weight", no_numbers(originals[name].weight))
                _set_module(layer.attention, name, made)
            # nothing is missing, whatever an architecture's own initialisation looks for in this module, but for
            # what no file holds: buffers that it computes
            if not layer.attention._non_persistent_buffers_set:
                layer.attention._is_hf_initialized = True  # type: ignore[assignment]
        for name, told in _modules(self.quantization_config).items():
            place, original = find_place(model, name)
            made_of = factored_module(told, original)
            made_of._is_hf_initialized = True  # type: ignore[assignment]
            _set_module(model, place, made_of)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, FactoredLinear):
                module.settle()
        for name, parameter in model.named_parameters():
            if name.endswith(".weight") and not parameter.numel():  # loading forgets that it is not trained
                parameter.requires_grad_(False)
        model.is_quantized = False  # type: ignore[assignment]  # all are ordinary numbers: any dtype, any training
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Multiply all factors out: what `model.dequantize()` calls."""
        for layer in _layers(model, self.quantization_config):
            for name, held in layer.projections().items():
                factored = cast(FactoredLinear | SideBySide, layer.attention.get_submodule(name))
                dense = factored.to_dense()
                if dense.bias is None and layer.holds_bias_of(held):  # the factors say it is zero
                    dense.bias = nn.Parameter(dense.weight.new_zeros(dense.out_features))
                _set_module(layer.attention, name, dense if layer.row.stored == "out_in" else _conv1d(dense))
            delattr(layer.attention, METHOD)
        row, _ = _row_and_sizes(model.config)
        for name in _modules(self.quantization_config):
            place, module = find_place(model, name)
            whole = cast(FactoredLinear | FactoredEmbedding, module).to_dense()
            is_conv = isinstance(whole, nn.Linear) and row.stored == "in_out"
            _set_module(model, place, _conv1d(cast(nn.Linear, whole)) if is_conv else whole)
        return model

    def is_serializable(self, *_: Any) -> bool:
        """Say that what was loaded can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Say that what was loaded can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Say that what was loaded can be compiled."""
        return True


class _Layer(NamedTuple):
    """One layer of a model and how its attention is stored."""

    attention: nn.Module
    described: list[dict[str, Any]]
    row: Architecture
    sizes: Sizes

    def projections(self) -> dict[str, str]:
        """Return the modules below the attention of which all projections are factored -> these projections."""
        weights = "".join(piece["of"] for piece in self.described)
        base, row = self.row.attention, self.row
        return {
            in_memory(row, f"{base}.{name}").removeprefix(f"{in_memory(row, base)}."): held
            for name, held in row.projections.items()
            if set(held) <= set(weights)
        }

    def holds_bias_of(self, held: str) -> bool:
        """Whether the biases of these projections are in the factors."""
        return set(held) <= set("".join(held_biases(piece, self.sizes.d_model) for piece in self.described))


def _layers(model: nn.Module, config: TnlibConfig) -> list[_Layer]:
    row, sizes = _row_and_sizes(model.config)
    return [
        _Layer(_find(model, in_memory(row, row.attention.format(layer=layer))), described, row, sizes)
        for layer, described in enumerate(_described(config))
        if described
    ]


def _row_and_sizes(config: Any) -> tuple[Architecture, Sizes]:
    row, values = ARCHITECTURES[config.model_type], config.to_dict()
    return row, read_sizes(row, values, "config.json", "from_pretrained")


def _described(config: TnlibConfig) -> list[list[dict[str, Any]]]:
    """Return the pieces of every layer, checked as `open_checkpoint` checks them."""
    section = {"quant_method": METHOD, "version": config.version, "layers": config.layers}
    return descriptions({KEY: section}) or []


def _modules(config: TnlibConfig) -> dict[str, dict[str, Any]]:
    """Return the described matrices outside the attention, checked as `open_checkpoint` checks them."""
    return described_modules({KEY: {MODULES: getattr(config, MODULES, {})}})


def find_place(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """Return where the module `path` is, perhaps below the base model of one with a head, and the module."""
    for name, module in model.named_modules():
        if name == path or name.endswith(f".{path}"):
            return name, module
    raise FileFormatError(
        f"from_pretrained: {type(model).__name__} must have a module {path!r}, found none; "
        "config.json belongs to another architecture."
    )


def _find(model: nn.Module, path: str) -> nn.Module:
    """Return the module at `path`."""
    return find_place(model, path)[1]


def _set_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


def _conv1d(linear: nn.Linear) -> Conv1D:
    """Return the layer of GPT-2 that stores its weight as (in, out)."""
    found = Conv1D(0, 0)  # type: ignore[no-untyped-call]
    found.nf, found.nx = linear.out_features, linear.in_features
    found.weight = nn.Parameter(linear.weight.detach().T.contiguous())
    found.bias = linear.bias
    return found
