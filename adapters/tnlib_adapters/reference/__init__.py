"""Reference forward pass in float64 numpy, for every architecture of the table (imported lazily)."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
