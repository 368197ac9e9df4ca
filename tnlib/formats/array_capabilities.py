"""Table of the functions that accept arrays of other libraries than numpy; the documentation and the tests read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capability:
    """Support of one function or method for arrays of other libraries."""

    name: str  # in tnlib, or the method of a format
    takes: str
    on_device: str  # the part of the work that is done where the array is
    has_gradient: bool  # torch differentiates through it


CAPABILITIES = (
    Capability("tt_svd", "an array", "Gram matrices, products, norms", False),
    Capability("ttm_svd", "a matrix", "Gram matrices, products, norms", False),
    Capability("tucker", "an array; `n_iter` on the host only", "Gram matrices, products, norms", False),
    Capability("svd", "an array", "the decomposition", False),
    Capability("full", "TensorTrain, TTMatrix, Tucker, SVD", "everything", True),
    Capability("inner", "TensorTrain, TTMatrix, Tucker; without `operator`", "everything", True),
    Capability("round", "TensorTrain, TTMatrix, Tucker, SVD", "all but ranks and signs", True),
    Capability("apply", "TTMatrix and TensorTrain or TTMatrix", "all but ranks and signs", True),
    Capability("canonicalize", "TensorTrain, TTMatrix", "all but signs", True),
)

# Library and device -> what was run: the tests of this table, or nothing yet.
LIBRARIES = {
    "torch on the CPU": "tested",
    "array_api_strict, on its CPU and on a device that numpy cannot read": "tested",
    "torch on CUDA and other devices": "not run",
    "CuPy": "not run",
    "JAX": "not run",
}


def capability_table() -> list[str]:
    """Return the lines of the table of functions in Markdown."""
    head = ["| function | takes | on the device | gradients of torch |", "|---|---|---|---|"]
    rows = [
        f"| `{row.name}` | {row.takes} | {row.on_device} | {'yes' if row.has_gradient else 'detached'} |"
        for row in CAPABILITIES
    ]
    return head + rows


def library_table() -> list[str]:
    """Return the lines of the table of libraries in Markdown."""
    return ["| arrays | state |", "|---|---|", *(f"| {name} | {state} |" for name, state in LIBRARIES.items())]
