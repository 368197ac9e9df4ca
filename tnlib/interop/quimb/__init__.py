"""General tensor networks through quimb; names are loaded on first use.

Formats convert to quimb's TensorNetwork and back, and trees, PEPS, MERA and other networks are contracted here. No
function changes its arguments. Where `tn` is not a TensorNetwork with at least one tensor, names are not those of its
indices, or another argument is out of range, all of them raise ArgumentTypeError or ArgumentError; their own pages name
further errors.
"""

from __future__ import annotations

import lazy_loader

from tnlib._registry import register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register("quimb.tensor.tensor_core:TensorNetwork", diagram="tnlib.interop.quimb.network_diagram:network_diagram")
register("tnlib.interop.quimb.network_format:Network", diagram="tnlib.interop.quimb.network_diagram:network_diagram")
