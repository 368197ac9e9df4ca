"""Diagrams of quimb networks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.drawing.diagram import Diagram, Leg, Node, Point
from tnlib.drawing.einsums import IndexEnds
from tnlib.drawing.layout import ChainRows, node_kind, point_towards
from tnlib.interop.quimb.network_arguments import as_arrays, as_network
from tnlib.interop.quimb.network_format import Network

_STEP = 1.4
_REACH = 0.75  # length of an open leg
_DIAGONAL_LABELS = {"S": "s", "WEIGHTS": "w", "LAMBDA": "$\\Lambda$"}  # by the tags that to_network sets
_FACTOR_LABELS = {"U": "U", "VH": "V$^H$", "LEFT": "left", "RIGHT": "right"}
_UNLABELED = {"SVD", "CP", "CORE"}


def network_diagram(value: Any) -> Diagram:
    """Return the diagram of a Network or a TensorNetwork: tensors at lattice sites, or where quimb's layout puts them.

    The kinds of tensors are measured. An index of three tensors or more, or an open index of two, runs through a copy
    tensor.
    """
    tn = as_network("draw", value.tn if isinstance(value, Network) else value)
    outer = tuple(value.legs or ()) if isinstance(value, Network) else tuple(tn.outer_inds())
    tensors = list(tn.tensor_map.values())
    index_ends = IndexEnds([tensor.inds for tensor in tensors], outer)
    copy_tensors = index_ends.copy_tensors
    sites = None if copy_tensors else _lattice_sites(tn, tensors)
    layout = _quimb_layout(tn, [*copy_tensors], outer) if sites is None else _site_layout(tensors, sites, outer)
    nodes: list[Node] = []
    for k, (tensor, a) in enumerate(zip(tensors, as_arrays("draw", tn), strict=True)):
        leg_ends = [index_ends.far_end(i, k, layout.chain_positions, layout.ends) for i in tensor.inds]
        position, label = layout.positions[k], _label(tensor.tags)
        if (a.ndim == 1 and tensor.inds[0] in copy_tensors) or _DIAGONAL_LABELS.keys() & set(tensor.tags):
            nodes.append(Node("weights", label, position))
            continue
        kind, direction = node_kind(a, leg_ends, layout.chain_positions[k], is_center="CENTER" in tensor.tags)
        nodes.append(Node(kind, "" if kind == "delta" else label, position, direction))
    nodes += [Node("delta", "", layout.positions[k]) for k in copy_tensors.values()]
    legs: list[Leg] = []
    for index, first, second, bond, axes in index_ends.bonds():
        name, size = "" if bond.startswith("_") else bond, int(tn.ind_size(index))  # quimb's own names begin with _
        if index in copy_tensors:
            legs.append(Leg(first, second, name, size, axes=axes))
        else:
            start, stop = (first, second) if (first, second) in layout.bond_points else (second, first)
            towards = _arrow(nodes, start, stop, layout.chain_positions)
            via = layout.bond_points.get((start, stop), ())
            legs.append(
                Leg(start, stop, name, size, via=via, towards=towards, axes=axes if start == first else axes[::-1])
            )
    legs += [
        Leg(index_ends.root(i), None, i, int(tn.ind_size(i)), layout.ends[i], axes=index_ends.open_axes(i))
        for i in outer
    ]
    return Diagram(tuple(nodes), tuple(legs), f"{type(tn).__name__}, {len(tensors)} tensors")


class _Positions(NamedTuple):
    """Positions of tensors and copy tensors, ends of open legs, and the bonds from the end of a row to the next."""

    positions: list[Point]
    ends: dict[str, Point]
    chain_positions: list[Point]  # positions if all tensors stood in one row, along which triangles point
    bond_points: dict[tuple[int, int], tuple[Point, ...]]


def _site_layout(tensors: Sequence[Any], sites: Sequence[tuple[int, int]], outer: Sequence[str]) -> _Positions:
    """Place tensors at (column, row) of a lattice; break a long chain into rows that are read like text."""
    positions = chain_positions = [(_STEP * x, -_STEP * y) for x, y in sites]
    bond_points = {}
    is_flat = len({y for _, y in sites}) == 1
    if {y for _, y in sites} == {0} and {x for x, _ in sites} == set(range(len(sites))):
        is_operator = any(sum(i in outer for i in tensor.inds) > 1 for tensor in tensors)
        rows = ChainRows.of_cores(len(sites), _STEP, is_operator=is_operator)
        positions = [rows.position(x) for x, _ in sites]
        order = sorted(range(len(sites)), key=lambda k: sites[k][0])
        bond_points = {pair: rows.bond_points(x) for x, pair in enumerate(itertools.pairwise(order))}
    # Open legs hang down, or point up and down if there are two; on a lattice they leave across its diagonal.
    directions = [(0.0, 1.0), (0.0, -1.0)] if is_flat else [(-0.6, 0.6), (-0.6, -0.6)]
    ends: dict[str, Point] = {}
    for k, tensor in enumerate(tensors):
        open_indices = [i for i in tensor.inds if i in outer]
        for n, index in enumerate(open_indices):
            dx, dy = directions[n % 2] if len(open_indices) > 1 else directions[1]
            x, y = positions[k]
            ends[index] = (x + _REACH * dx + 0.3 * (n // 2), y + _REACH * dy)
    return _Positions(positions, ends, chain_positions, bond_points)


def _quimb_layout(tn: Any, joined: Sequence[str], outer: Sequence[str]) -> _Positions:
    """Place tensors by quimb's force-directed layout, rotated and scaled."""
    raw = {key: np.asarray(point, float) for key, point in tn.draw(get="pos").items()}
    keys = [*tn.tensor_map, *joined]
    points = np.array([raw[key] for key in keys])
    bonds = [tuple(tids) for index, tids in tn.ind_map.items() if index not in joined and len(tids) == 2]
    bonds += [(index, tid) for index in joined for tid in tn.ind_map[index]]
    factor = _scale(points, [float(np.hypot(*(raw[a] - raw[b]))) for a, b in bonds])
    center, rotation = points.mean(axis=0), _level_rotation(points)
    moved = {key: (point - center) @ rotation * factor for key, point in raw.items()}
    placed = {key: (float(x), float(y)) for key, (x, y) in moved.items()}
    positions = [placed[key] for key in keys]
    ends = {}
    for index in outer:
        root = placed[index if index in joined else min(tn.ind_map[index])]
        ends[index] = point_towards(root, placed.get(index, (0.0, 0.0)), _REACH)
    return _Positions(positions, ends, positions, {})


def _lattice_sites(tn: Any, tensors: Sequence[Any]) -> list[tuple[int, int]] | None:
    """Return (column, row) of every tensor if tags name its site and bonds join nearest neighbours, else None."""
    sites_by_tag = _site_tags(tn, tensors)
    tagged = [[sites_by_tag[tag] for tag in tensor.tags if tag in sites_by_tag] for tensor in tensors]
    if any(len(sites) != 1 for sites in tagged):
        return None
    positions = [site[::-1] if isinstance(site, tuple) else (site, 0) for (site,) in tagged]
    if all(row == 0 for _, row in positions):  # several chains on the same sites, such as a state and its conjugate
        rows: Counter[int] = Counter()
        for k, (column, _) in enumerate(positions):
            positions[k] = (column, rows[column])
            rows[column] += 1
    ends = [[positions[k] for k, tensor in enumerate(tensors) if index in tensor.inds] for index in tn.inner_inds()]
    are_neighbours = all(sum(abs(p - q) for p, q in zip(*pair, strict=True)) == 1 for pair in ends)
    return positions if are_neighbours and len(set(positions)) == len(positions) else None


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


def _arrow(nodes: Sequence[Node], a: int, b: int, positions: Sequence[Point]) -> int | None:
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
    core = ["core"] if "CORE" in tags else []
    return next(iter([*diagonal, *factors, *(sites if len(sites) == 1 else []), *others, *core]), "")
