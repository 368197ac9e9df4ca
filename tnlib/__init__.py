"""Tensor trains, Tucker and CP decompositions under one error contract.

Public names are loaded when they are first used (SPEC 1), so that importing tnlib costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"

_HOME = {
    # decompose
    "svd": "tnlib.decompose.svd",
    "tt_svd": "tnlib.decompose.tt_svd",
    "ttm_svd": "tnlib.decompose.tt_svd",
    "tucker": "tnlib.decompose.tucker",
    "cp": "tnlib.decompose.cp",
    "tt_cross": "tnlib.decompose.tt_cross",
    # ops
    "round": "tnlib.ops.round",
    "round_randomized": "tnlib.ops.round_randomized",
    "canonicalize": "tnlib.ops.canonicalize",
    "isometry_errors": "tnlib.ops.canonicalize",
    "vidal": "tnlib.ops.canonicalize",
    "canonical_form": "tnlib.ops.canonical_form",
    "balance": "tnlib.ops.balance",
    "match": "tnlib.ops.match",
    "degenerate_groups": "tnlib.ops.degenerate",
    "canonical_basis": "tnlib.ops.degenerate",
    "nearest_tie": "tnlib.ops.degenerate",
    "schmidt_values": "tnlib.ops.schmidt",
    "entropy": "tnlib.ops.schmidt",
    "entanglement_spectrum": "tnlib.ops.schmidt",
    "correlation_length": "tnlib.ops.schmidt",
    "truncate_bond": "tnlib.ops.schmidt",
    "inner": "tnlib.ops.inner",
    "distance": "tnlib.ops.inner",
    "apply": "tnlib.ops.apply",
    "entries": "tnlib.ops.entries",
    "contract": "tnlib.ops.contract",
    "sum_legs": "tnlib.ops.contract",
    "kron": "tnlib.ops.join",
    "concatenate": "tnlib.ops.join",
    "convert": "tnlib.ops.convert",
    # formats
    "SVD": "tnlib.formats.svd",
    "LowRank": "tnlib.formats.low_rank",
    "TensorTrain": "tnlib.formats.train",
    "TTMatrix": "tnlib.formats.train",
    "Tucker": "tnlib.formats.tucker",
    "CP": "tnlib.formats.cp",
    "Vidal": "tnlib.formats.vidal",
    "KroneckerTerms": "tnlib.formats.kronecker",
    # pictures
    "draw": "tnlib.drawing.draw",
    # files
    "save": "tnlib.io",
    "load": "tnlib.io",
    # results and errors
    "Fit": "tnlib._fit",
    "Match": "tnlib.ops.match",
    "TnlibError": "tnlib._errors",
    "ArgumentError": "tnlib._errors",
    "ArgumentTypeError": "tnlib._errors",
    "FileFormatError": "tnlib._errors",
    "MissingFileError": "tnlib._errors",
    "ConvergenceWarning": "tnlib._errors",
    "DegenerateCutWarning": "tnlib._errors",
}

_PARTS = ("drawing", "experimental", "network")  # packages with a table of contents of their own

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    from tnlib._lazy import load  # not above: importing tnlib reads this file alone

    return load(__name__, _HOME, _PARTS, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS])
