"""Ground states of TeNPy with conserved charges, truncated and returned: which truncations keep the charge.

    python -m benchmarks.charges

prints, per model and truncation, how many of nine returns to TeNPy succeed with plain cuts, with cuts beside groups of
nearly equal Schmidt values, and with a projection, and the largest deviation of the overlap with the ground state from
1 - error^2. The nine truncations: rtol 1e-1 to 1e-6, and three largest ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from tenpy.algorithms.dmrg import TwoSiteDMRGEngine
from tenpy.models.hubbard import FermiHubbardModel
from tenpy.models.xxz_chain import XXZChain
from tenpy.networks.mps import MPS
from tnlib_adapters.interop.tenpy import from_tenpy, to_tenpy

import tnlib

_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Heisenberg, 20 spins": (XXZChain, {"L": 20, "Jxx": 1.0, "Jz": 1.0, "hz": 0.0, "conserve": "Sz"}),
    "Hubbard, U = 4 t, 8 sites": (
        FermiHubbardModel,
        {"L": 8, "t": 1.0, "U": 4.0, "mu": 0.0, "cons_N": "N", "cons_Sz": "Sz"},
    ),
}
_TRUNCATIONS: tuple[dict[str, Any], ...] = (
    *({"rtol": 10.0**-k} for k in range(1, 7)),
    *({"max_rank": rank} for rank in (7, 13, 24)),
)


def ground_state(kind: Any, options: dict[str, Any]) -> MPS:
    """Return the ground state of a finite chain, by DMRG from a state of alternating spins."""
    model = kind({**options, "bc_MPS": "finite"})
    length = options["L"]
    state = MPS.from_product_state(model.lat.mps_sites(), ["up", "down"] * (length // 2), unit_cell_width=length)
    dmrg = {"mixer": True, "max_sweeps": 8, "trunc_params": {"chi_max": 48, "svd_min": 1e-10}}
    TwoSiteDMRGEngine(state, model, dmrg).run()
    return state


def returned(state: MPS, cut: dict[str, Any], back: Callable[[float], dict[str, Any]]) -> tuple[int, float]:
    """Return how many truncations return to TeNPy with the charge, and the largest deviation of their overlap."""
    train, succeeded, largest = from_tenpy(state), 0, 0.0
    for truncation in _TRUNCATIONS:
        fit = tnlib.round(train, **truncation, **cut)
        try:
            theirs = to_tenpy(fit.value, state.sites, **back(fit.error))
        except tnlib.ArgumentError:
            continue
        charges = [one.get_total_charge(only_physical_legs=True).tolist() for one in (state, theirs)]
        succeeded += charges[0] == charges[1]
        deviation = abs(state.overlap(theirs) / state.norm - (1 - fit.error**2))
        largest = max(largest, deviation)
    return succeeded, largest


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    print("| state | cuts | returned, of 9 | deviation of the overlap |\n|---|---|---|---|")
    ways: dict[str, tuple[dict[str, Any], Callable[[float], dict[str, Any]]]] = {
        "anywhere": ({}, lambda error: {}),
        "anywhere, `to_tenpy(rtol=error)`": ({}, lambda error: {"rtol": max(error, 1e-10)}),
        "`degeneracy_tol=1e-3`": ({"degeneracy_tol": 1e-3}, lambda error: {}),
    }
    for name, (kind, options) in _MODELS.items():
        state = ground_state(kind, options)
        for way, (cut, back) in ways.items():
            succeeded, largest = returned(state, cut, back)
            print(f"| {name} | {way} | {succeeded} | {largest if succeeded else math.nan:.0e} |", flush=True)


if __name__ == "__main__":
    main()
