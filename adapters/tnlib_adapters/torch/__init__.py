"""Compressed checkpoints in transformers: importing this package makes `from_pretrained` read them."""

from tnlib_adapters.torch.reload import TnlibConfig, TnlibQuantizer

__all__ = ["TnlibConfig", "TnlibQuantizer"]
