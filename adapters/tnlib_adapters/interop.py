"""Conversion to and from other libraries: from_X and to_X for objects of library X, read and write for its files.

This is a second name of `tnlib.interop`, with one module per library: `interop.quimb` is `tnlib.interop.quimb`, and
`interop.torchtt` the module of all libraries of one table, `tnlib.interop.tensor_libraries`.
"""

from __future__ import annotations

import sys

from tnlib.interop import itensor as itensor
from tnlib.interop import quimb as quimb
from tnlib.interop import tenpy as tenpy
from tnlib.interop import tensor_libraries

pyttb = teneva = tensorkrowch = tensorly = tntorch = torchtt = tensor_libraries

for _name in ("itensor", "pyttb", "quimb", "teneva", "tenpy", "tensorkrowch", "tensorly", "tntorch", "torchtt"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]
