"""Transformer checkpoints as tensor networks: attention operators, compression, and ways back into a model.

No framework is imported here, nor anything else before it is used (SPEC 1).
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
