"""transformers quantizer for compressed checkpoints: `AutoModel.from_pretrained` of a folder from `tnlib compress`.

transformers calls the quantizer that is registered for the quantization method of a config before and after loading the
weights. The first call replaces the projections of the attention by factored layers. Their factors are parameters of
one module below the attention, under their names in the file, so that loading finds every tensor and `save_pretrained`
writes the same file. `model.dequantize()` returns a dense model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tnlib import FileFormatError
from tnlib_adapters.architectures.resolve_wiring import wire
from tnlib_adapters.architectures.wiring import AttentionWiring, Wiring
from tnlib_adapters.factors.config_section import KEY, WEIGHTS_FILE, descriptions
from tnlib_adapters.factors.factored_matrix import METHOD, Description, scale_name
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, no_numbers
from tnlib_adapters.transformers_plugin.factored_modules import (
    FactoredEmbedding,
    LayerFactors,
    SideBySide,
    TiedUnembedding,
    build,
    factored_module,
    tied_module,
)


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
    """Replaces layers of compressed weights by factored layers."""

    requires_calibration = False
    quantization_config: TnlibConfig

    def update_attn_implementation(self, config: Any) -> Any:
        """Return the configuration without the entry that stops transformers where this plug-in is not imported."""
        vars(config).pop(WEIGHTS_FILE, None)
        return config

    update_tp_plan = update_attn_implementation  # which earlier versions of transformers call

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        wiring, described = _wired(model, self.quantization_config)
        for layer in _layers(model, wiring, described):
            modules = layer.projections()
            originals = {name: cast(Any, layer.attention.get_submodule(name)) for name in modules}
            home = LayerFactors(layer.described, next(iter(originals.values())).weight)
            layer.attention.add_module(METHOD, home)
            for name, letters in modules.items():
                factored = build(layer.described, letters, home, layer.wiring)
                if not layer.holds_bias_of(letters):
                    factored.bias = originals[name].bias
                factored.register_parameter("weight", no_numbers(originals[name].weight))
                layer.attention.set_submodule(name, factored)
            # skip the architecture's own initialisation, which looks for dense weights, unless it computes buffers
            # that no file holds
            if not layer.attention._non_persistent_buffers_set:
                layer.attention._is_hf_initialized = True  # type: ignore[assignment]
        for description, place in _places(model, wiring, described):
            module = factored_module(description, model.get_submodule(place), wiring.embedding.scale)
            _set_initialized(model, place, module)
            if isinstance(module, FactoredEmbedding):
                sources = dict(model.all_tied_weights_keys)
                tied = [weight for weight, source in sources.items() if source == f"{place}.weight"]
                for other in (weight.removesuffix(".weight") for weight in tied):
                    tied_to = tied_module(description, module, model.get_submodule(other))
                    _set_initialized(model, other, tied_to)
                    del model.all_tied_weights_keys[f"{other}.weight"]  # there is no parameter of this name any more

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, FactoredLinear):
                module.settle()
        for name, parameter in model.named_parameters():
            if name.endswith(".weight") and not parameter.numel():  # loading resets requires_grad
                parameter.requires_grad_(False)
        model.is_quantized = False  # type: ignore[assignment]  # factors are ordinary floats: any dtype, any training
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Multiply all factors out; called by `model.dequantize()`."""
        wiring, described = _wired(model, self.quantization_config)
        for layer in _layers(model, wiring, described):
            for name, letters in layer.projections().items():
                factored = cast(FactoredLinear | SideBySide, layer.attention.get_submodule(name))
                dense = factored.to_dense()
                if dense.bias is None and layer.holds_bias_of(letters):  # the factors imply zero
                    dense.bias = nn.Parameter(dense.weight.new_zeros(dense.out_features))
                is_conv = layer.wiring.projections[letters].stored == "in_out"
                layer.attention.set_submodule(name, _conv1d(dense) if is_conv else dense)
            delattr(layer.attention, METHOD)
        for description, place in _places(model, wiring, described):
            module = cast(FactoredLinear | FactoredEmbedding, model.get_submodule(place))
            dense_module = module.to_dense()
            is_linear = isinstance(dense_module, nn.Linear) and not wiring.is_unembedding(description.module)
            is_conv = is_linear and wiring.matrices[description.module].stored == "in_out"
            model.set_submodule(place, _conv1d(cast(nn.Linear, dense_module)) if is_conv else dense_module)
            for other, tied in list(model.named_modules()):
                if isinstance(tied, FactoredEmbedding | TiedUnembedding) and tied.embedding is module:
                    dense_tied = tied.to_dense()
                    dense_tied.weight = dense_module.weight
                    model.set_submodule(other, dense_tied)
                    model.all_tied_weights_keys[f"{other}.weight"] = f"{place}.weight"
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return the tensors to save, scales of packed integers in bfloat16; None for the state dict as it is."""
        tensors = model.state_dict()
        packed = [scale_name(name) for name, tensor in tensors.items() if tensor.dtype == torch.uint8]
        scales = {name: tensors[name].to(torch.bfloat16) for name in packed if name in tensors}
        return (tensors | scales if scales else None), {}

    def is_serializable(self, *_: Any) -> bool:
        """Return True: loaded models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return True: loaded models can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Return True: loaded models can be compiled."""
        return True


class _FactoredModule(NamedTuple):
    """One attention layer of a model, the descriptions of its factors, and its wiring."""

    attention: nn.Module
    described: list[Description]
    wiring: AttentionWiring

    def projections(self) -> dict[str, str]:
        """Return {module below the attention: its projections} for modules whose projections are all factored."""
        weights = "".join(description.of for description in self.described)
        return {
            linear.module.removeprefix(f"{self.wiring.parent}."): letters
            for letters, linear in self.wiring.projections.items()
            if set(letters) <= set(weights)
        }

    def holds_bias_of(self, letters: str) -> bool:
        """Test if the factors include the biases of these projections."""
        d_model = self.wiring.sizes.d_model
        return set(letters) <= set("".join(description.held_biases(d_model) for description in self.described))


def _wired(model: Any, config: TnlibConfig) -> tuple[Wiring, list[Description]]:
    """Return the wiring of a model and its factored matrices, checked as `open_checkpoint` checks them."""
    function = "from_pretrained"
    wiring = wire(model.config.to_dict(), (), where="config.json", function=function, prefix="", loaded=True)
    return wiring, descriptions({KEY: vars(config)}, wiring.attention_modules, wiring.sizes, function) or []


def _layers(model: nn.Module, wiring: Wiring, described: Sequence[Description]) -> list[_FactoredModule]:
    layers = []
    for module, layer in zip(wiring.attention_modules, wiring.layers, strict=True):
        of_layer = [description for description in described if description.of and description.module == module]
        if of_layer:
            attention = find_place(model, layer.attention.parent)[1]
            layers.append(_FactoredModule(attention, of_layer, layer.attention))
    return layers


def _places(model: Any, wiring: Wiring, described: Sequence[Description]) -> Iterator[tuple[Description, str]]:
    """Yield the factored matrices outside the attention, and the names of their modules; no absent unembedding."""
    head = model.get_output_embeddings()
    for description in (description for description in described if not description.of):
        if not wiring.is_unembedding(description.module):
            yield description, find_place(model, description.module)[0]
        elif head is not None:
            yield description, next(name for name, module in model.named_modules() if module is head)


def find_place(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """Return name and module at `path`, also below the base model of a model with a head."""
    for name, module in model.named_modules():
        if name == path or name.endswith(f".{path}"):
            return name, module
    raise FileFormatError(
        f"from_pretrained: {type(model).__name__} must have a module {path!r}, found none; "
        "config.json belongs to another architecture."
    )


def _set_initialized(root: nn.Module, name: str, module: nn.Module) -> None:
    module._is_hf_initialized = True  # type: ignore[assignment]
    root.set_submodule(name, module)


def _conv1d(linear: nn.Linear) -> Conv1D:
    """Return GPT-2's layer type, which stores its weight as (in, out)."""
    layer = Conv1D(0, 0)  # type: ignore[no-untyped-call]
    layer.nf, layer.nx = linear.out_features, linear.in_features
    layer.weight = nn.Parameter(linear.weight.detach().T.contiguous())
    layer.bias = linear.bias
    return layer
