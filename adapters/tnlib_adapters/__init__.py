"""Transformer checkpoints as tensor networks: attention operators, compression, and ways back into a model.

No framework is imported here, nor anything else before it is used (SPEC 1).
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "open_checkpoint": "tnlib_adapters.attention.checkpoint",
    "Checkpoint": "tnlib_adapters.attention.checkpoint",
    "Attention": "tnlib_adapters.attention.attention",
    "HeadNorm": "tnlib_adapters.attention.head_norm",
    "PositionParts": "tnlib_adapters.attention.learned",
    "Rotary": "tnlib_adapters.attention.rotary",
    "FrozenAttention": "tnlib_adapters.attention.frozen",
    "FrozenStack": "tnlib_adapters.attention.frozen_stack",
    "FrozenPaths": "tnlib_adapters.attention.frozen_stack",
    "ResidualProduct": "tnlib_adapters.attention.residual_product",
    "freeze": "tnlib_adapters.attention.frozen_stack",
    "fix_gauge": "tnlib_adapters.attention.head_gauge",
    "head_order": "tnlib_adapters.attention.head_gauge",
    "fold": "tnlib_adapters.attention.folding",
    "Folded": "tnlib_adapters.attention.folding",
    "norm_divisors": "tnlib_adapters.attention.fold_norms",
    "rotate": "tnlib_adapters.attention.rotation",
    "save_checkpoint": "tnlib_adapters.attention.changed",
    "View": "tnlib_adapters.attention.stacks",
    "compare_formats": "tnlib_adapters.attention.format_table",
    "compress": "tnlib_adapters.compression.compress",
    "compare": "tnlib_adapters.compression.compare",
    "evaluate": "tnlib_adapters.compression.evaluate",
    "Evaluation": "tnlib_adapters.compression.evaluate",
    "inspect": "tnlib_adapters.inspection.inspect",
    "Inspection": "tnlib_adapters.inspection.measure",
    "builtin_path": "tnlib_adapters.data.builtin",
}

_PARTS = ("circuits",)  # packages with a table of contents of their own

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"tnlib_adapters.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'tnlib_adapters' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS])
