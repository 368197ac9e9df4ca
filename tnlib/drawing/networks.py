"""Diagrams of networks of quimb."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.drawing.chains import Places
from tnlib.drawing.graph import Diagram, Leg, Node, Point
from tnlib.network.arguments import arrays_of, as_network
from tnlib.network.special import is_isometry

_STEP = 1.4
_REACH = 0.75
_MOST_ENTRIES = 1 << 22  # of tensors that are measured
_DIAGONAL = {"S": "s", "WEIGHTS": "w", "LAMBDA": "$\\Lambda$"}  # tags that to_network gives
_PARTS = {"U": "U", "VH": "V$^H$", "LEFT": "left", "RIGHT": "right"}
_NO_LABELS = {"SVD", "CP", "CORE"}
_MOST_LEGS = 6  # of more legs than these, only single ones are tried as the tip of a triangle


def of_network(tn: Any, legs: Sequence[str] | None = None) -> Diagram:
    """Describe a network: what its tensors are is measured, where they stand is left to quimb or to their sites.

    An index of three tensors or more, or an open one of two, runs through a copy tensor.
    """
    as_network("draw", tn)
    tensors = list(tn.tensor_map.values())
    arrays = arrays_of("draw", tensors)
    outer = tuple(tn.outer_inds()) if legs is None else tuple(legs)
    holders: dict[str, list[int]] = {}
    for k, tensor in enumerate(tensors):
        for index in tensor.inds:
            holders.setdefault(index, []).append(k)
    hubs = {i: len(tensors) + n for n, i in enumerate(i for i, at in holders.items() if len(at) + (i in outer) > 2)}
    places, ends, line, ways = _lay_out(tn, tensors, list(hubs), outer)
    nodes: list[Node] = []
    for k, (tensor, a) in enumerate(zip(tensors, arrays, strict=True)):
        far = {i: _far_end(i, k, holders, hubs, line, ends) for i in tensor.inds}
        nodes.append(_node(tensor, a, places[k], line[k], far, set(hubs)))
    nodes += [Node("delta", "", places[k]) for k in hubs.values()]
    lines: list[Leg] = []
    for index, at in holders.items():
        size = int(tn.ind_size(index))
        if index in hubs:
            lines += [Leg(k, hubs[index], _shown(index) if n == 0 else "", size) for n, k in enumerate(at)]
        elif len(at) == 2:
            one, two = at if (at[0], at[1]) in ways else at[::-1]
            way = ways.get((one, two), ())
            lines.append(Leg(one, two, _shown(index), size, via=way, towards=_tip(nodes, (one, two), line)))
    for index in outer:
        root = hubs.get(index, holders[index][0])
        lines.append(Leg(root, None, index, int(tn.ind_size(index)), ends[index]))
    return Diagram(tuple(nodes), tuple(lines), f"{type(tn).__name__}, {len(tensors)} tensors")


class _Layout(NamedTuple):
    """Where tensors and copy tensors stand and open indices end; of a chain in rows, how rows are joined."""

    places: dict[int, Point]
    ends: dict[str, Point]
    line: dict[int, Point]  # where they would stand in one row, which is what triangles point along
    ways: dict[tuple[int, int], tuple[Point, ...]]  # from the end of a row to the next, by tensors


def _lay_out(tn: Any, tensors: Sequence[Any], hubs: Sequence[str], outer: Sequence[str]) -> _Layout:
    """Put tensors on their sites, or where quimb puts them."""
    sites = None if hubs else _sites(tn, tensors)
    if sites is not None:
        line = {k: (_STEP * x, -_STEP * y) for k, (x, y) in enumerate(sites)}
        rows = _rows(tensors, sites, outer)
        places, ways = line, {}
        if rows is not None:
            places = {k: rows.at(x) for k, (x, _) in enumerate(sites)}
            order = sorted(range(len(sites)), key=lambda k: sites[k][0])
            ways = {pair: rows.way(x) for x, pair in enumerate(itertools.pairwise(order))}
        ends = _ends_at_sites(tensors, places, outer, flat=len({y for _, y in sites}) == 1)
        return _Layout(places, ends, line, ways)
    found = {key: np.asarray(p, float) for key, p in tn.draw(get="pos").items()}
    tids = list(tn.tensor_map)
    points = np.array([*(found[t] for t in tids), *(found[i] for i in hubs)])
    ties = [*_pairs(tn, hubs), *((i, t) for i in hubs for t in tn.ind_map[i])]
    scale = _scale(points, [float(np.hypot(*(found[a] - found[b]))) for a, b in ties])
    turn = _turn(points)
    middle = points.mean(axis=0)
    put = {key: (p - middle) @ turn * scale for key, p in found.items()}
    places = {k: _pair(put[key]) for k, key in enumerate([*tids, *hubs])}
    roots = {i: places[len(tids) + hubs.index(i)] if i in hubs else _pair(put[min(tn.ind_map[i])]) for i in outer}
    ends = {i: _at_reach(roots[i], _pair(put[i]) if i in put else (0.0, 0.0)) for i in outer}
    return _Layout(places, ends, places, {})


def _sites(tn: Any, tensors: Sequence[Any]) -> list[tuple[int, int]] | None:
    """Return a place on the lattice per tensor, column and row, where tags say one and bonds join neighbours."""
    tags = _site_tags(tn, tensors)
    own = [[tags[tag] for tag in tensor.tags if tag in tags] for tensor in tensors]
    if any(len(at) != 1 for at in own):
        return None
    found = [(at[0][1], at[0][0]) if isinstance(at[0], tuple) else (at[0], 0) for at in own]
    found = _layered(found) if all(y == 0 for _, y in found) else found
    ends = [[found[k] for k, tensor in enumerate(tensors) if index in tensor.inds] for index in tn.inner_inds()]
    near = all(sum(abs(p - q) for p, q in zip(*pair, strict=True)) == 1 for pair in ends)
    return found if near and len(set(found)) == len(found) else None


def _layered(sites: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the places of chains that stand on the same sites, such as a state and its conjugate: one row each."""
    seen: Counter[int] = Counter()
    out = []
    for x, y in sites:
        out.append((x, y + seen[x]))
        seen[x] += 1
    return out


def _rows(tensors: Sequence[Any], sites: Sequence[tuple[int, int]], outer: Sequence[str]) -> Places | None:
    """Return the rows of a long chain, read like text; None for a lattice, whose rows are its own."""
    if {y for _, y in sites} != {0} or {x for x, _ in sites} != set(range(len(sites))):
        return None
    operator = any(sum(i in outer for i in tensor.inds) > 1 for tensor in tensors)
    return Places(len(sites), 3.5, _STEP, between=0.5) if operator else Places(len(sites), 2.7, _STEP)


def _site_tags(tn: Any, tensors: Sequence[Any]) -> dict[str, Any]:
    """Return the site that each tag stands for: of a train, or of what quimb knows as a lattice."""
    if all({"TensorTrain", "TTMatrix"} & set(tensor.tags) for tensor in tensors):
        return {f"I{k}": k for k in range(len(tensors))}
    if not hasattr(tn, "gen_sites_present") or not hasattr(tn, "site_tag"):
        return {}
    tags = {tn.site_tag(site): site for site in tn.gen_sites_present()}
    known = all(isinstance(site, int) or (isinstance(site, tuple) and len(site) == 2) for site in tags.values())
    return tags if known else {}


def _ends_at_sites(
    tensors: Sequence[Any], places: Mapping[int, Point], outer: Sequence[str], flat: bool
) -> dict[str, Point]:
    """Let open indices hang down, or stand up where there are two; on a lattice they leave across its diagonal."""
    ends: dict[str, Point] = {}
    for k, tensor in enumerate(tensors):
        own = [i for i in tensor.inds if i in outer]
        ways = [(0.0, 1.0), (0.0, -1.0)] if flat else [(-0.6, 0.6), (-0.6, -0.6)]
        for n, index in enumerate(own):
            x, y = ways[n % 2] if len(own) > 1 else ways[1]
            ends[index] = (places[k][0] + _REACH * x + 0.3 * (n // 2), places[k][1] + _REACH * y)
    return ends


def _pairs(tn: Any, hubs: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    for index, tids in tn.ind_map.items():
        if index not in hubs and len(tids) == 2:
            yield tuple(tids)


def _scale(points: Array, lengths: Sequence[float]) -> float:
    """Return the factor that gives most bonds the usual length and, where that is not too much, all tensors room."""
    usual = _STEP / (float(np.median(lengths)) if lengths else 1.0)
    gaps = [float(np.hypot(*(a - b))) for a, b in itertools.combinations(points, 2)]
    return max(usual, min(1.0 / max(min(gaps), 1e-9), 2.5 * usual)) if gaps else usual


def _turn(points: Array) -> Array:
    """Return the rotation that lays the longest extent of points level, the first of them to the left."""
    centered = points - points.mean(axis=0)
    axes = np.linalg.svd(centered)[2] if len(points) > 1 else np.eye(2)
    if (centered[0] @ axes[0]) > 0:
        axes = -axes
    return np.array([axes[0], [-axes[0][1], axes[0][0]]]).T


def _at_reach(root: Point, end: Point) -> Point:
    x, y = end[0] - root[0], end[1] - root[1]
    length = math.hypot(x, y)
    return (root[0] + _REACH * x / length, root[1] + _REACH * y / length) if length else (root[0], root[1] - _REACH)


def _far_end(
    index: str,
    k: int,
    holders: Mapping[str, Sequence[int]],
    hubs: Mapping[str, int],
    places: Mapping[int, Point],
    ends: Mapping[str, Point],
) -> Point:
    if index in hubs:
        return places[hubs[index]]
    others = [other for other in holders[index] if other != k]
    return places[others[0]] if others else ends.get(index, places[k])


def _node(tensor: Any, a: Array, at: Point, here: Point, far: Mapping[str, Point], hubs: set[str]) -> Node:
    """Return the node of a tensor at a place; its directions are those from `here` to the far ends of its legs."""
    label = _label(tensor.tags)
    if _DIAGONAL.keys() & set(tensor.tags) or (a.ndim == 1 and tensor.inds[0] in hubs):
        return Node("weights", label, at)
    kind, direction = measured(a, [far[i] for i in tensor.inds], here, center="CENTER" in tensor.tags)
    return Node(kind, "" if kind == "delta" else label, at, direction)


def measured(a: Array, far: Sequence[Point], here: Point, *, center: bool = False) -> tuple[str, Point | None]:
    """Return what a tensor is, and of an isometry where its tip points: to the far ends of the legs there."""
    if _is_delta(a):
        return "delta", None
    tip = () if center or a.size > _MOST_ENTRIES else _tip_legs(a)
    if tip and math.prod(a.shape[k] for k in tip) ** 2 == a.size and 2 * len(tip) == a.ndim:
        return "unitary", None
    ways = np.array([np.subtract(far[k], here) for k in tip], dtype=float)
    direction = _pair(ways.sum(axis=0)) if len(ways) else (0.0, 0.0)
    if math.hypot(*direction) > 1e-9:
        return "isometry", direction
    return ("matrix" if a.ndim == 2 else "tensor"), None


def _tip_legs(a: Array) -> tuple[int, ...]:
    """Return the legs at the tip of the triangle, the fewest that will do; none where the tensor is no isometry."""
    if a.ndim < 2:
        return ()
    most = a.ndim // 2 if a.ndim <= _MOST_LEGS else 1
    groups = (legs for n in range(1, most + 1) for legs in itertools.combinations(range(a.ndim), n))
    return next((legs for legs in groups if is_isometry(a, legs)), ())


def _is_delta(a: Array) -> bool:
    if a.ndim < 3 or len(set(a.shape)) > 1 or a.size > _MOST_ENTRIES:
        return False
    n = a.shape[0]
    return bool(np.count_nonzero(a) == n and (a[(np.arange(n),) * a.ndim] == 1).all())


def _tip(nodes: Sequence[Node], at: Sequence[int], places: Mapping[int, Point]) -> int | None:
    """Return the end of a bond that the triangle at its other end points to, if one does."""
    for near, far in ((at[0], at[1]), (at[1], at[0])):
        if nodes[near].direction is not None:
            way = np.subtract(places[far], places[near])
            along = np.array(nodes[near].direction)
            if float(way @ along) > 0.999 * math.hypot(*way) * math.hypot(*along):
                return far
    return None


def _label(tags: Sequence[str]) -> str:
    """Return what says most in the least room: what is diagonal, then where a tensor stands, then its part."""
    if diagonal := [_DIAGONAL[tag] for tag in tags if tag in _DIAGONAL]:
        return diagonal[0]
    sites = [tag[1:] for tag in tags if tag[:1] == "I" and tag[1:].replace(",", "").isdigit()]
    parts = [_PARTS[tag] for tag in tags if tag in _PARTS]
    others = [tag for tag in tags if len(tag) <= 4 and tag not in _NO_LABELS and tag[:1] not in "_I"]
    short = [*parts, *(sites if len(sites) == 1 else ()), *others]
    return short[0] if short else "core" if "CORE" in tags else ""


def _shown(index: str) -> str:
    """Return the name of an index, of those that quimb made up nothing."""
    return "" if index.startswith("_") else index


def _pair(p: Any) -> Point:
    return float(p[0]), float(p[1])
