"""Attributions of scores as a graph in the JSON of circuit-tracer.

Nodes are the writers at the two positions of a score, pairs of writers, and the score, drawn as an output with its
attention weight as probability. A pair has links from its two writers, and a link to the score; the pairs that are not
listed are one error node, so that the links into a score sum to it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._files import write_whole
from tnlib._validate import as_count, as_path, is_list
from tnlib_adapters.circuits.attribution.query_key_attributions import ScoreAttribution
from tnlib_adapters.files.json_file import JsonFile

_INDEX = "graph-metadata.json"  # lists the graphs of a folder for the viewer

_SLUG = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_FEATURE = "cross layer transcoder"  # the type of node that the viewer draws as a feature

Json = dict[str, Any]


def save_score_graph(
    folder: str | os.PathLike[str],
    scores: ScoreAttribution | Sequence[ScoreAttribution],
    tokens: Sequence[str],
    *,
    slug: str = "scores",
    count: int = 20,
) -> Path:
    """Write scores as a graph for the viewer of circuit-tracer (`circuit-tracer start-server --graph_file_dir FOLDER`).

    Parameters
    ----------
    folder
        Folder of graphs; made if it does not exist. Its list of graphs, graph-metadata.json, gets an entry.
    scores
        One or more scores of one text, from `QKAttributions.score`.
    tokens
        Names of the tokens of the text.
    slug
        Name of the graph and of its file.
    count
        Largest number of pairs per score; the others are summed.

    Returns
    -------
    Path
        FOLDER/SLUG.json.

    Raises
    ------
    ArgumentError
        If a position is beyond the tokens, or the slug is no file name.

    References
    ----------
    M. Hanna et al., "circuit-tracer", https://github.com/decoderesearch/circuit-tracer.

    Examples
    --------
    >>> import json, tempfile, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = tnlib_adapters.circuits.qk_attributions(model, [5, 6, 7, 8, 5, 6])
    >>> score = found.score(1, 2, query=5, key=2)
    >>> names = ["t5", "t6", "t7", "t8", "t5", "t6"]
    >>> path = save_score_graph(tempfile.mkdtemp(), score, names, slug="induction")
    >>> path.name, len(json.loads(path.read_text())["nodes"])
    ('induction.json', 35)
    """
    listed = [scores] if isinstance(scores, ScoreAttribution) else list(scores) if is_list(scores) else []
    if not listed or not all(isinstance(score, ScoreAttribution) for score in listed):
        raise ArgumentTypeError(
            f"save_score_graph: scores must be ScoreAttributions, got {type(scores).__name__}; pass found.score(...)."
        )
    if not is_list(tokens) or not all(isinstance(token, str) for token in tokens):
        raise ArgumentTypeError(
            f"save_score_graph: tokens must be a list of names, got {tokens!r:.40}; pass one for each token."
        )
    _check_graph(listed, tokens, slug)
    graph = _Graph([str(token) for token in tokens])
    end = 1 + max(score.head[0] for score in listed)
    for score in listed:
        graph.add_score(score, end, as_count("save_score_graph", "count", count))
    path = as_path("save_score_graph", "folder", folder)
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"save_score_graph: folder must be a folder, got the file {path}; pass another one.")
    path.mkdir(parents=True, exist_ok=True)
    content, others = graph.as_json(slug), [g for g in _listed_graphs(path / _INDEX) if g.get("slug") != slug]
    _write_json(path / f"{slug}.json", content)
    _write_json(path / _INDEX, {"graphs": [*others, content["metadata"]]})
    return path / f"{slug}.json"


def _check_graph(scores: Sequence[ScoreAttribution], tokens: Sequence[str], slug: Any) -> None:
    """Raise `ArgumentError` if a position has no token, or the slug is no name of a graph."""
    longest = max(max(score.query, score.key) for score in scores)
    if longest >= len(tokens):
        raise ArgumentError(
            f"save_score_graph: tokens must name all positions, got {len(tokens)} names and position {longest}; pass "
            "those of the text."
        )
    if not isinstance(slug, str) or not _SLUG.fullmatch(slug) or f"{slug}.json" == _INDEX:
        raise ArgumentError(
            f"save_score_graph: slug must be a file name other than {_INDEX}, got {slug!r:.80}; pass letters and "
            "dashes."
        )


class _Graph:
    """Nodes by name and links of a graph, filled score by score."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.nodes: dict[str, Json] = {}
        self.links: list[Json] = []

    def add_score(self, score: ScoreAttribution, end: int, count: int) -> None:
        """Add a score in layer `end`, its largest pairs and their writers."""
        layer, head = score.head
        query, key = (f"{self.tokens[at]}@{at}" for at in (score.query, score.key))
        target = self.node(f"{end}_{layer}.{head}_{score.query}_{score.key}", str(end), score.query, "logit")
        text = f'Output "{layer}.{head}: {query} to {key}" (p={score.weight:.3f})'
        target |= {
            "clerp": text,
            "token_prob": score.weight,
            "is_target_logit": not self.links,
            "activation": score.total,
        }
        rows = score.top(count)
        for of_query, of_key, value in rows:
            name = f"{of_query} @ {query} with {of_key} @ {key}"
            pair = self.node(f"{layer}_{layer}.{head}_{name}", str(layer), score.query, _FEATURE)
            pair |= {"clerp": f"{layer}.{head}: {name}", "activation": value}
            for writer, at in dict.fromkeys([(of_query, score.query), (of_key, score.key)]):
                self.link(self.writer(writer, at), pair, value)
            self.link(pair, target, value)
        rest = self.node(f"{layer}_rest_{target['node_id']}", str(layer), score.query, "mlp reconstruction error")
        rest["clerp"] = f"{layer}.{head}: all other pairs"
        self.link(rest, target, score.total - sum(value for *_, value in rows))

    def writer(self, name: str, at: int) -> Json:
        """Return the node of a writer at a position."""
        if name == "tokens":
            return self.node(f"E_{at}", "E", at, "embedding")
        number = name.removeprefix("mlp ").partition(".")[0]
        node = self.node(f"{name}_{at}", number if number.isdecimal() else "0", at, _FEATURE)
        node["clerp"] = f"{name} @ {self.tokens[at]}"
        return node

    def node(self, name: str, layer: str, at: int, kind: str) -> Json:
        """Return the node of a name, new if it is not known; features are numbered apart.

        The viewer hides a feature that occurs at most positions.
        """
        new = {"node_id": name, "jsNodeId": name, "feature": len(self.nodes), "layer": layer, "ctx_idx": at}
        new |= {"feature_type": kind, "token_prob": 0.0, "is_target_logit": False, "clerp": "", "activation": None}
        new |= {"run_idx": 0, "reverse_ctx_idx": 0, "influence": None}
        return self.nodes.setdefault(name, new)

    def link(self, source: Json, target: Json, weight: float) -> None:
        """Add a link."""
        self.links.append({"source": source["node_id"], "target": target["node_id"], "weight": weight})

    def as_json(self, slug: str) -> Json:
        """Return the graph as circuit-tracer writes it."""
        metadata: Json = {"slug": slug, "scan": "tnlib", "transcoder_list": [], "prompt_tokens": self.tokens}
        metadata |= {"prompt": "".join(self.tokens), "node_threshold": 1.0, "schema_version": 1}
        view = {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
        return {"metadata": metadata, "qParams": view, "nodes": list(self.nodes.values()), "links": self.links}


def _listed_graphs(index: Path) -> list[Json]:
    """Return the entries of the list of graphs of a folder."""
    if not index.is_file():
        return []
    graphs = JsonFile("save_score_graph", index, "pass another folder").read().get("graphs", [])
    return [graph for graph in graphs if isinstance(graph, dict)] if isinstance(graphs, list) else []


def _write_json(path: Path, content: Json) -> None:
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
