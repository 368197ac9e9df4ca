"""Operators to analysis: composition of heads and the paths through layers; loaded when it is used."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "composition_score": "tnlib_adapters.circuits.chance",
    "Score": "tnlib_adapters.circuits.chance",
    "compositions": "tnlib_adapters.circuits.composition",
    "Compositions": "tnlib_adapters.circuits.composition",
    "stream_moments": "tnlib_adapters.circuits.composition",
    "path_contributions": "tnlib_adapters.circuits.paths",
    "PathContributions": "tnlib_adapters.circuits.paths",
    "Paths": "tnlib_adapters.circuits.paths",
    "stream_by_order": "tnlib_adapters.circuits.paths",
    "path_losses": "tnlib_adapters.circuits.losses_by_path",
    "PathLosses": "tnlib_adapters.circuits.losses_by_path",
    "StreamParts": "tnlib_adapters.circuits.parts",
    "split_stream": "tnlib_adapters.circuits.parts",
    "OpenLayer": "tnlib_adapters.circuits.open_layer",
    "pair_effects": "tnlib_adapters.circuits.open_layer",
    "TenTerms": "tnlib_adapters.circuits.two_layers",
    "ten_terms": "tnlib_adapters.circuits.two_layers",
    "toy_induction": "tnlib_adapters.circuits.toy_head",
    "ToyInduction": "tnlib_adapters.circuits.toy_head",
    "find_induction": "tnlib_adapters.circuits.induction",
    "Induction": "tnlib_adapters.circuits.induction",
    "find_circuit": "tnlib_adapters.circuits.pruned_circuit",
    "Circuit": "tnlib_adapters.circuits.pruned_circuit",
    "read_head": "tnlib_adapters.circuits.head_reading",
    "HeadReading": "tnlib_adapters.circuits.head_reading",
    "singular_features": "tnlib_adapters.circuits.features",
    "Features": "tnlib_adapters.circuits.features",
    "TokenFeature": "tnlib_adapters.circuits.token_features",
    "form_maximum": "tnlib_adapters.circuits.maximum",
    "Maximum": "tnlib_adapters.circuits.maximum",
    "copying": "tnlib_adapters.circuits.token_copying",
    "copying_scores": "tnlib_adapters.circuits.token_copying",
    "Copying": "tnlib_adapters.circuits.token_copying",
    "read_vocabulary": "tnlib_adapters.circuits.ends",
    "Vocabulary": "tnlib_adapters.circuits.vocabulary",
    "bigrams": "tnlib_adapters.circuits.direct_path",
    "Bigrams": "tnlib_adapters.circuits.direct_path",
    "subspace_overlaps": "tnlib_adapters.circuits.subspaces",
    "Overlaps": "tnlib_adapters.circuits.subspaces",
    "head_subspace": "tnlib_adapters.circuits.subspaces",
    "principal_angles": "tnlib_adapters.circuits.angles",
    "Angles": "tnlib_adapters.circuits.angles",
    "score_shares": "tnlib_adapters.circuits.key_shares",
    "ScoreShares": "tnlib_adapters.circuits.key_shares",
    "pattern_scores": "tnlib_adapters.circuits.attending",
    "repeat_scores": "tnlib_adapters.circuits.attending",
    "PatternScores": "tnlib_adapters.circuits.attending",
    "weight_scores": "tnlib_adapters.circuits.by_weights",
    "WeightScores": "tnlib_adapters.circuits.by_weights",
    "block_diagram": "tnlib_adapters.circuits.block_diagrams",
    "feed_forward_diagram": "tnlib_adapters.circuits.block_diagrams",
    "model_diagram": "tnlib_adapters.circuits.model_diagrams",
    "composition_diagram": "tnlib_adapters.circuits.composition_diagrams",
    "dense_diagram": "tnlib_adapters.circuits.composition_diagrams",
    "frozen_diagram": "tnlib_adapters.circuits.diagrams",
    "layer_diagram": "tnlib_adapters.circuits.diagrams",
    "ov_diagram": "tnlib_adapters.circuits.diagrams",
    "qk_diagram": "tnlib_adapters.circuits.diagrams",
    "term_diagram": "tnlib_adapters.circuits.term_diagrams",
    "heat_map": "tnlib_adapters.circuits.pictures",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tnlib_adapters.circuits' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
