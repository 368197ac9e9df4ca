"""Compressed checkpoints in transformers: importing this package makes `from_pretrained` read them."""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"tnlib_adapters.torch needs torch and transformers, found no {missing.name}; pip install 'tnlib[torch]'.",
        name=missing.name,
    ) from None

from tnlib_adapters.torch.interpolative import InterpolativeLinear
from tnlib_adapters.torch.modules import FactoredLinear, LowRankLinear, TTLinear
from tnlib_adapters.torch.multilinear import CPLinear, TuckerLinear
from tnlib_adapters.torch.reload import TnlibConfig, TnlibQuantizer

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
