"""General networks, by way of quimb: a table of contents, loaded when it is used.

Whatever is no train, Tucker or CP becomes a quimb TensorNetwork here: trees, PEPS, MERA, circuits of formats.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "to_network": "tnlib.network.build",
    "from_network": "tnlib.network.recognise",
    "spell_out": "tnlib.network.copies",
    "contract": "tnlib.network.contraction",
    "contraction_cost": "tnlib.network.cost",
    "Cost": "tnlib.network.cost",
    "poke_hole": "tnlib.network.hole",
    "derivative": "tnlib.network.hole",
    "tree": "tnlib.network.tree",
    "Network": "tnlib.network.value",
    "gauge_loops": "tnlib.network.loops",
    "Gauged": "tnlib.network.loops",
    "delta": "tnlib.network.special",
    "identity": "tnlib.network.special",
    "flattening": "tnlib.network.special",
    "swap": "tnlib.network.special",
    "isometry_error": "tnlib.network.special",
    "is_isometry": "tnlib.network.special",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tnlib.network' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
