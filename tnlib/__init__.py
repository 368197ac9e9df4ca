"""Tensor trains, Tucker and CP decompositions under one error contract.

Invalid arguments are refused before any work, with an `ArgumentError` (a ValueError) or an `ArgumentTypeError` (a
TypeError) that names the function, the parameter, what is expected, what was passed, and a remedy. So are NaN and inf.
Docstrings name further errors only. The stub beside this file lists the public names, loaded on first use (SPEC 1).
"""

from __future__ import annotations

from typing import Any

import lazy_loader

__version__ = "0.3.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_ELSEWHERE = {  # names of other libraries
    "MPS": "TensorTrain",
    "MPO": "TTMatrix",
    "compress": "round, or tnlib_adapters.compress for models",
    "dmrg": "DMRG of quimb or TeNPy (docs/choose.md)",
    "tdvp": "TDVP of TeNPy (docs/choose.md)",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        raise AttributeError(f"No tnlib attribute {name}; use {_ELSEWHERE[name]}", name=name)
    return _load(name)
