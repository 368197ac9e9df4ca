"""Circuits in the JSON of the Mechanistic Interpretability Benchmark (MIB), which TransformerLens-based tools read.

Its nodes are "input", "a0.h3" for head 3 of layer 0, "m0" for feed-forward layer 0, and "logits"; its edges
"a0.h3->a1.h2<k>" and "m0->logits". Tokens and positions are one node there, biases are none.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from tnlib import ArgumentError
from tnlib._files import write_whole
from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.circuits.discovery.circuit_search import Circuit
from tnlib_adapters.circuits.discovery.faithfulness import Scores, edge_scores

_HEAD = re.compile(r"(\d+)\.(\d+)(?: ([QKV]))?")
_FEED_FORWARD = re.compile(r"mlp (\d+)")


@accepts_models
def save_mib_circuit(path: str | os.PathLike[str], model: Checkpoint, scores: Scores) -> Path:
    """Write scores of edges, and the circuit where there is one, as a graph of MIB.

    Parameters
    ----------
    path
        The file, replaced if it exists.
    model
        The model of the scores: its sizes are written too.
    scores
        What `edge_effects` returned, a circuit of edges, or numbers by edge. Scores of tokens and positions are added.
        Edges of biases are left out. Only the remaining edges of a circuit are marked as in the graph; without a
        circuit all are.

    Raises
    ------
    ArgumentError
        If the name of an edge is unknown.

    References
    ----------
    A. Mueller et al., "MIB: A Mechanistic Interpretability Benchmark" (2025).

    Examples
    --------
    >>> import json, os, tempfile, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> file = save_mib_circuit(
    ...     os.path.join(tempfile.mkdtemp(), "circuit.json"), model, {"0.3 -> 1.2 K": 0.5}
    ... )
    >>> json.loads(file.read_text())["edges"]
    {'a0.h3->a1.h2<k>': {'score': 0.5, 'in_graph': True}}
    """
    function = "save_mib_circuit"
    target = as_path(function, "path", path)
    sizes = as_one_stream(function, model, "model").sizes
    by_name = edge_scores(function, scores)
    kept = set(scores.kept) if isinstance(scores, Circuit) else set(by_name)
    edges: dict[str, dict[str, Any]] = {}
    for name, score in by_name.items():
        writer, reader = name.split(" -> ")
        if writer.endswith(".bias"):
            continue
        edge = edges.setdefault(f"{_node(writer)}->{_node(reader)}", {"score": 0.0, "in_graph": False})
        edge["score"] += score
        edge["in_graph"] |= name in kept
    nodes = ["input", *(f"a{layer}.h{head}" for layer in range(sizes.n_layers) for head in range(sizes.n_heads))]
    nodes += [f"m{layer}" for layer in range(sizes.n_layers)]
    used = {edge.split("->")[0] for edge, info in edges.items() if info["in_graph"]}
    config = {"n_layers": sizes.n_layers, "n_heads": sizes.n_heads, "d_model": sizes.d_model}
    graph = {
        "cfg": {**config, "parallel_attn_mlp": model.wiring.layers[0].parallel},
        "nodes": {node: {"in_graph": node in used} for node in nodes} | {"logits": {"in_graph": True}},
        "edges": edges,
    }
    write_whole(target, json.dumps(graph).encode())
    return target


def _node(name: str) -> str:
    """Return the name of a writer or reader in a graph of MIB.

    >>> _node("17.4 Q"), _node("mlp 0"), _node("positions")
    ('a17.h4<q>', 'm0', 'input')
    """
    if name in ("tokens", "positions"):
        return "input"
    if head := _HEAD.fullmatch(name):
        layer, index, side = head.groups()
        return f"a{layer}.h{index}" + (f"<{side.lower()}>" if side else "")
    if feed_forward := _FEED_FORWARD.fullmatch(name):
        return f"m{feed_forward[1]}"
    if name == "logits":
        return name
    raise ArgumentError(
        f"save_mib_circuit: edges must lead between tokens, positions, heads, feed-forward layers and logits, got "
        f"{name!r}; leave it out."
    )
