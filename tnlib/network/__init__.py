"""General networks, by way of quimb: a table of contents, loaded when it is used.

Whatever is no train, Tucker or CP becomes a quimb TensorNetwork here: trees, PEPS, MERA, circuits of formats.
"""

from __future__ import annotations

from tnlib._lazy import contents

_HOME = {
    "to_network": "tnlib.network.build",
    "from_network": "tnlib.network.recognise",
    "spell_out": "tnlib.network.copies",
    "contract": "tnlib.network.contraction",
    "contraction_cost": "tnlib.network.cost",
    "Cost": "tnlib.network.cost",
    "poke_hole": "tnlib.network.hole",
    "derivative": "tnlib.network.hole",
    "tree": "tnlib.network.trees",
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

__getattr__, __dir__, __all__ = contents(__name__, _HOME)
