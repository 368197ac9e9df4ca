"""Diagrams of quimb networks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.drawing.diagram import Diagram, Leg, Node, Point
from tnlib.drawing.layout import ChainRows, point_towards
from tnlib.drawing.node_kinds import node_kind
from tnlib.interop.quimb.network_arguments import as_arrays, as_network
from tnlib.interop.quimb.network_format import Network

_STEP = 1.4
_REACH = 0.75  # length of an open leg
_DIAGONAL_LABELS = {"S": "s", "WEIGHTS": "w", "LAMBDA": "$\\Lambda$"}  # by the tags that to_network sets
_FACTOR_LABELS = {"U": "U", "VH": "V$^H$", "LEFT": "left", "RIGHT": "right"}
_UNLABELED = {"SVD", "CP", "CORE"}


def network_format_diagram(t: Network) -> Diagram:
    """Return the diagram of a network with its legs in order."""
    return network_diagram(t.tn, t.legs)


def network_diagram(tn: Any, legs: Sequence[str] | None = None) -> Diagram:
    """Return the diagram of a TensorNetwork: tensors at their lattice sites, or where quimb's layout puts them.

    The kinds of tensors are measured. An index of three tensors or more, or an open index of two, runs through a copy
    tensor. `legs` are the open indices, by default `tn.outer_inds()`.
    """
    as_network("draw", tn)
    tensors = list(tn.tensor_map.values())
    arrays = as_arrays("draw", tn)
    outer = tuple(tn.outer_inds()) if legs is None else tuple(legs)
    holders: dict[str, list[int]] = {}  # tensors that have the index
    for k, tensor in enumerate(tensors):
        for index in tensor.inds:
            holders.setdefault(index, []).append(k)
    joined = [index for index, ks in holders.items() if len(ks) + (index in outer) > 2]
    copy_tensors = {index: len(tensors) + n for n, index in enumerate(joined)}
    layout = _lay_out(tn, tensors, joined, outer)
    nodes: list[Node] = []
    for k, (tensor, a) in enumerate(zip(tensors, arrays, strict=True)):
        leg_ends = [_far_end(index, k, holders[index], copy_tensors, layout) for index in tensor.inds]
        nodes.append(_node(tensor, a, layout.positions[k], layout.chain_positions[k], leg_ends, copy_tensors))
    nodes += [Node("delta", "", layout.positions[k]) for k in copy_tensors.values()]
    lines: list[Leg] = []
    for index, ks in holders.items():
        name, size = "" if index.startswith("_") else index, int(tn.ind_size(index))  # quimb's own names begin with _
        if index in copy_tensors:
            lines += [Leg(k, copy_tensors[index], name if n == 0 else "", size) for n, k in enumerate(ks)]
        elif len(ks) == 2:
            start, stop = ks if (ks[0], ks[1]) in layout.bond_points else ks[::-1]
            via = layout.bond_points.get((start, stop), ())
            towards = _arrow(nodes, start, stop, layout.chain_positions)
            lines.append(Leg(start, stop, name, size, via=via, towards=towards))
    for index in outer:
        root = copy_tensors.get(index, holders[index][0])
        lines.append(Leg(root, None, index, int(tn.ind_size(index)), layout.ends[index]))
    return Diagram(tuple(nodes), tuple(lines), f"{type(tn).__name__}, {len(tensors)} tensors")


class _Layout(NamedTuple):
    """Positions of tensors and copy tensors, ends of open legs, and the bonds from the end of a row to the next."""

    positions: dict[int, Point]
    ends: dict[str, Point]
    chain_positions: dict[int, Point]  # positions if all tensors stood in one row, along which triangles point
    bond_points: dict[tuple[int, int], tuple[Point, ...]]


def _lay_out(tn: Any, tensors: Sequence[Any], joined: Sequence[str], outer: Sequence[str]) -> _Layout:
    """Place tensors at their sites, or where quimb puts them."""
    sites = None if joined else _lattice_sites(tn, tensors)
    return _quimb_layout(tn, joined, outer) if sites is None else _site_layout(tensors, sites, outer)


def _site_layout(tensors: Sequence[Any], sites: Sequence[tuple[int, int]], outer: Sequence[str]) -> _Layout:
    """Place tensors at (column, row) of a lattice; break a long chain into rows that are read like text."""
    chain_positions = {k: (_STEP * x, -_STEP * y) for k, (x, y) in enumerate(sites)}
    positions, bond_points = chain_positions, {}
    is_flat = len({y for _, y in sites}) == 1
    if {y for _, y in sites} == {0} and {x for x, _ in sites} == set(range(len(sites))):
        is_operator = any(sum(i in outer for i in tensor.inds) > 1 for tensor in tensors)
        rows = ChainRows.of_cores(len(sites), _STEP, is_operator=is_operator)
        positions = {k: rows.position(x) for k, (x, _) in enumerate(sites)}
        order = sorted(range(len(sites)), key=lambda k: sites[k][0])
        bond_points = {pair: rows.bond_points(x) for x, pair in enumerate(itertools.pairwise(order))}
    # Open legs hang down, or point up and down if there are two; on a lattice they leave across its diagonal.
    directions = [(0.0, 1.0), (0.0, -1.0)] if is_flat else [(-0.6, 0.6), (-0.6, -0.6)]
    ends: dict[str, Point] = {}
    for k, tensor in enumerate(tensors):
        own = [i for i in tensor.inds if i in outer]
        for n, index in enumerate(own):
            dx, dy = directions[n % 2] if len(own) > 1 else directions[1]
            x, y = positions[k]
            ends[index] = (x + _REACH * dx + 0.3 * (n // 2), y + _REACH * dy)
    return _Layout(positions, ends, chain_positions, bond_points)


def _quimb_layout(tn: Any, joined: Sequence[str], outer: Sequence[str]) -> _Layout:
    """Place tensors by quimb's force-directed layout, rotated and scaled."""
    raw = {key: np.asarray(point, float) for key, point in tn.draw(get="pos").items()}
    keys = [*tn.tensor_map, *joined]
    points = np.array([raw[key] for key in keys])
    bonds = [tuple(tids) for index, tids in tn.ind_map.items() if index not in joined and len(tids) == 2]
    bonds += [(index, tid) for index in joined for tid in tn.ind_map[index]]
    factor = _scale(points, [float(np.hypot(*(raw[a] - raw[b]))) for a, b in bonds])
    center, rotation = points.mean(axis=0), _level_rotation(points)
    placed = {key: _as_point((point - center) @ rotation * factor) for key, point in raw.items()}
    positions = {k: placed[key] for k, key in enumerate(keys)}
    ends = {}
    for index in outer:
        root = placed[index if index in joined else min(tn.ind_map[index])]
        ends[index] = point_towards(root, placed.get(index, (0.0, 0.0)), _REACH)
    return _Layout(positions, ends, positions, {})


def _lattice_sites(tn: Any, tensors: Sequence[Any]) -> list[tuple[int, int]] | None:
    """Return (column, row) of every tensor if tags name its site and bonds join nearest neighbours, else None."""
    sites_by_tag = _site_tags(tn, tensors)
    tagged = [[sites_by_tag[tag] for tag in tensor.tags if tag in sites_by_tag] for tensor in tensors]
    if any(len(sites) != 1 for sites in tagged):
        return None
    places = [site[::-1] if isinstance(site, tuple) else (site, 0) for (site,) in tagged]
    if all(row == 0 for _, row in places):  # several chains on the same sites, such as a state and its conjugate
        rows: Counter[int] = Counter()
        for k, (column, _) in enumerate(places):
            places[k] = (column, rows[column])
            rows[column] += 1
    ends = [[places[k] for k, tensor in enumerate(tensors) if index in tensor.inds] for index in tn.inner_inds()]
    are_neighbours = all(sum(abs(p - q) for p, q in zip(*pair, strict=True)) == 1 for pair in ends)
    return places if are_neighbours and len(set(places)) == len(places) else None


def _site_tags(tn: Any, tensors: Sequence[Any]) -> dict[str, Any]:
    """Return the site of each tag: of a train of tnlib, or of a network that quimb knows as a lattice."""
    if all({"TensorTrain", "TTMatrix"} & set(tensor.tags) for tensor in tensors):
        return {f"I{k}": k for k in range(len(tensors))}
    if not hasattr(tn, "gen_sites_present") or not hasattr(tn, "site_tag"):
        return {}
    tags = {tn.site_tag(site): site for site in tn.gen_sites_present()}
    is_planar = all(isinstance(site, int) or (isinstance(site, tuple) and len(site) == 2) for site in tags.values())
    return tags if is_planar else {}


def _scale(points: Array, lengths: Sequence[float]) -> float:
    """Return the factor that gives the median bond the usual length and, within limits, all tensors room."""
    usual = _STEP / (float(np.median(lengths)) if lengths else 1.0)
    gaps = [float(np.hypot(*(a - b))) for a, b in itertools.combinations(points, 2)]
    return max(usual, min(1.0 / max(min(gaps), 1e-9), 2.5 * usual)) if gaps else usual


def _level_rotation(points: Array) -> Array:
    """Return the rotation (2, 2) that makes the principal axis of points horizontal, with the first one on the left."""
    x, y = (points - points.mean(axis=0)).T
    angle = 0.5 * math.atan2(2 * (x @ y), x @ x - y @ y)  # of the principal axis
    cos, sin = math.cos(angle), math.sin(angle)
    if x[0] * cos + y[0] * sin > 0:
        cos, sin = -cos, -sin
    return np.array([[cos, -sin], [sin, cos]])


def _far_end(index: str, k: int, holders: Sequence[int], copy_tensors: Mapping[str, int], layout: _Layout) -> Point:
    """Return the other end of the leg `index` of tensor k."""
    if index in copy_tensors:
        return layout.chain_positions[copy_tensors[index]]
    others = [other for other in holders if other != k]
    return layout.chain_positions[others[0]] if others else layout.ends.get(index, layout.chain_positions[k])


def _node(
    tensor: Any, a: Array, position: Point, origin: Point, leg_ends: Sequence[Point], copy_tensors: Mapping[str, int]
) -> Node:
    """Return the node of a tensor at a position; directions are those from `origin` to the ends of its legs."""
    label = _label(tensor.tags)
    if _DIAGONAL_LABELS.keys() & set(tensor.tags) or (a.ndim == 1 and tensor.inds[0] in copy_tensors):
        return Node("weights", label, position)
    kind, direction = node_kind(a, leg_ends, origin, is_center="CENTER" in tensor.tags)
    return Node(kind, "" if kind == "delta" else label, position, direction)


def _arrow(nodes: Sequence[Node], a: int, b: int, positions: Mapping[int, Point]) -> int | None:
    """Return the end of the bond to which the triangle at the other end points, None if there is no such triangle."""
    for near, far in ((a, b), (b, a)):
        direction = nodes[near].direction
        if direction is not None:
            bond = np.subtract(positions[far], positions[near])
            if float(bond @ np.array(direction)) > 0.999 * math.hypot(*bond) * math.hypot(*direction):
                return far
    return None


def _label(tags: Sequence[str]) -> str:
    """Return the most specific short label: diagonal factor, other factor, site, another short tag, or core."""
    diagonal = [_DIAGONAL_LABELS[tag] for tag in tags if tag in _DIAGONAL_LABELS]
    factors = [_FACTOR_LABELS[tag] for tag in tags if tag in _FACTOR_LABELS]
    sites = [tag[1:] for tag in tags if tag[:1] == "I" and tag[1:].replace(",", "").isdigit()]
    others = [tag for tag in tags if len(tag) <= 4 and tag not in _UNLABELED and tag[:1] not in "_I"]
    labels = [*diagonal, *factors, *(sites if len(sites) == 1 else ()), *others, *(("core",) if "CORE" in tags else ())]
    return labels[0] if labels else ""


def _as_point(p: Array) -> Point:
    return float(p[0]), float(p[1])
