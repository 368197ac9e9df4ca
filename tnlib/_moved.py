"""Module names of version 0.1 that are gone, with the packages that have their public names now."""

from __future__ import annotations

_OLD_NAMES = {
    "tnlib": (
        "decompose decompose.cp decompose.svd decompose.tt_cross decompose.tt_svd decompose.tucker "
        "formats.kronecker formats.low_rank formats.svd formats.vidal ops.apply ops.balance ops.canonicalize "
        "ops.degenerate ops.join ops.match ops.round_randomized ops.schmidt"
    ),
    "tnlib.drawing": "drawing.graph drawing.steps",
    "tnlib.experimental": "experimental.spectral_radius",
    "tnlib.interop.quimb": (
        "network.build network.contraction network.copies network.cost network.hole network.loops "
        "network.recognise network.special network.trees network.value"
    ),
}
MOVED = {f"tnlib.{name}": new for new, names in _OLD_NAMES.items() for name in names.split()}
