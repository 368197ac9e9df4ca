"""Compressed checkpoints in transformers: importing this package makes `from_pretrained` read them."""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"tnlib_adapters.transformers_plugin needs torch and transformers, found no {missing.name}; "
        "pip install 'tnlib[torch]'.",
        name=missing.name,
    ) from None

from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, LowRankLinear, TTLinear
from tnlib_adapters.transformers_plugin.interpolative_linear import InterpolativeLinear
from tnlib_adapters.transformers_plugin.quantizer import TnlibConfig, TnlibQuantizer
from tnlib_adapters.transformers_plugin.tucker_cp_linear import CPLinear, TuckerLinear

__all__ = [
    "CPLinear",
    "FactoredLinear",
    "InterpolativeLinear",
    "LowRankLinear",
    "TTLinear",
    "TnlibConfig",
    "TnlibQuantizer",
    "TuckerLinear",
]
