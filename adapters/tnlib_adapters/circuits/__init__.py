"""Circuit analysis of attention: composition of heads, paths through layers, circuit discovery (imported lazily)."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
