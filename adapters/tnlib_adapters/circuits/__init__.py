"""Circuit analysis of attention: composition of heads, paths through layers, circuit discovery (imported lazily)."""

from __future__ import annotations

from typing import Any

import lazy_loader

from tnlib._deprecation import renamed_names

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_RENAMED = {"Features": "SingularVectors", "singular_features": "singular_vectors", "TokenFeature": "TokenVectors"}


def __getattr__(name: str) -> Any:
    return renamed_names(__name__, _RENAMED)(name) if name in _RENAMED else _load(name)
