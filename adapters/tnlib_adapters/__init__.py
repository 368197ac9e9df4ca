"""Transformer checkpoints as tensor networks: attention operators, compression, and ways back into a model.

No framework is imported here, nor anything else before it is used (SPEC 1).
"""

from __future__ import annotations

from tnlib._lazy import contents

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

__getattr__, __dir__, __all__ = contents(__name__, _HOME, _PARTS)
