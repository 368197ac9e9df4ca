"""Tensor trains, Tucker and CP decompositions under one error contract.

The stub beside this file lists the public names, which are loaded when they are first used (SPEC 1).
"""

from __future__ import annotations

import lazy_loader

from tnlib._deprecation import alias_old_modules
from tnlib._moved import MOVED

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

alias_old_modules(MOVED)
