"""Transformer checkpoints as tensor networks: attention operators, compression, and ways back into a model.

No framework is imported here, nor anything else before it is used (SPEC 1).
"""

from __future__ import annotations

import lazy_loader

from tnlib._deprecation import alias_old_modules
from tnlib_adapters._moved import MOVED

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

alias_old_modules(MOVED)
