"""Compressed checkpoints in transformers: importing this package makes `from_pretrained` read them."""

from tnlib._validate import import_optional

import_optional(__name__, "torch", "'tnlib[torch]'")
import_optional(__name__, "transformers", "'tnlib[torch]'")

from tnlib_adapters.transformers_plugin.contracted_linear import ContractedLinear  # noqa: E402
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear  # noqa: E402
from tnlib_adapters.transformers_plugin.factored_modules import keep_dequantized  # noqa: E402
from tnlib_adapters.transformers_plugin.indexed_linear import InterpolativeLinear  # noqa: E402
from tnlib_adapters.transformers_plugin.inference_layers import use_linear_layers  # noqa: E402
from tnlib_adapters.transformers_plugin.onnx_export import export_onnx  # noqa: E402
from tnlib_adapters.transformers_plugin.quantizer import TnlibConfig, TnlibQuantizer  # noqa: E402

__all__ = [
    "ContractedLinear",
    "FactoredLinear",
    "InterpolativeLinear",
    "TnlibConfig",
    "TnlibQuantizer",
    "export_onnx",
    "keep_dequantized",
    "use_linear_layers",
]
