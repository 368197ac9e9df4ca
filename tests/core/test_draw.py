"""Pictures say what their values are: counted in the description, and whole on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import quimb.tensor as qtn
from hypothesis import given, settings
from hypothesis import strategies as st

import tnlib
from tnlib.drawing import Bubble, Diagram, Leg, Node, join, sweep_steps
from tnlib.drawing.paint import thickness


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def train(sizes: list[int], rank: int, seed: int = 0) -> tnlib.TensorTrain:
    ranks = [1, *[rank] * (len(sizes) - 1), 1]
    g = rng(seed)
    return tnlib.TensorTrain([g.standard_normal((ranks[k], n, ranks[k + 1])) for k, n in enumerate(sizes)])


def low(m: int, r: int, n: int) -> tnlib.LowRank:
    return tnlib.LowRank(rng(1).standard_normal((m, r)), rng(2).standard_normal((r, n)))


def values() -> dict[str, Any]:
    x = rng().standard_normal((3, 4, 5))
    tt = tnlib.tt_svd(x).value
    return {
        "svd": tnlib.svd(x, left=(0, 2)).value,
        "low rank": low(6, 2, 5),
        "train": tt,
        "one core": tnlib.TensorTrain([np.ones((1, 3, 1))]),
        "zero": tnlib.tt_svd(np.zeros((2, 3, 2))).value,
        "long train": train([2] * 57, 3),
        "operator": tnlib.ttm_svd(rng().standard_normal((12, 20)), (3, 4), (4, 5)).value,
        "vidal": tnlib.vidal(tt),
        "tucker": tnlib.tucker(x, ranks=(2, 3, 4)).value,
        "cp": tnlib.CP(np.ones(2), [rng().standard_normal((n, 2)) for n in (3, 4, 5)]),
        "terms": tnlib.KroneckerTerms(rng().standard_normal((3, 4, 4)), [np.eye(5)] * 3),
        "factored terms": tnlib.KroneckerTerms(rng().standard_normal((3, 4, 4)), [low(5, 2, 5)] * 3),
        "array": x,
        "vector": np.ones(3),
        "complex": tnlib.tt_svd((x + 1j * x[::-1]).astype(np.complex64)).value,
        "network": tnlib.network.to_network(tt),
        "lattice": qtn.PEPS.rand(2, 3, bond_dim=2, seed=0),
        "loop": qtn.TN_rand_reg(6, 3, 2, phys_dim=2, seed=1),
        "no legs": qtn.TN_rand_reg(4, 3, 2, seed=1),
        "value": tnlib.network.Network(tnlib.network.to_network(tt)),
        "several": [tt, tnlib.canonicalize(tt, 0)],
    }


@pytest.mark.parametrize("name", values())
def test_every_kind_is_painted_whole(name: str, tmp_path: Path) -> None:
    picture = tnlib.draw(values()[name])
    picture.save(tmp_path / "a.png")
    picture.save(str(tmp_path / "a.svg"))
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "a.png").read_bytes()[-8:-4] == b"IEND"
    assert ElementTree.fromstring((tmp_path / "a.svg").read_text()).tag.endswith("svg")
    assert picture._repr_svg_() == (tmp_path / "a.svg").read_text()
    assert tnlib.draw(values()[name])._repr_svg_() == picture._repr_svg_(), "the same value, the same file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg"]


@pytest.mark.parametrize("name", values())
def test_everything_stays_on_the_paper_and_apart(name: str) -> None:
    picture = tnlib.draw(values()[name])
    axes = picture.figure.axes[0]
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    diagram = picture.diagram
    points = [n.position for n in diagram.nodes] + [leg.end for leg in diagram.legs if leg.end]
    assert all(x0 < x < x1 and y0 < y < y1 for x, y in points)
    for text in axes.texts:
        (left, low), (right, high) = axes.transData.inverted().transform(text.get_window_extent().get_points())
        assert x0 <= left <= right <= x1, text.get_text()
        assert y0 <= low <= high <= y1, text.get_text()
    places = np.array([n.position for n in diagram.nodes])
    gaps = np.linalg.norm(places[:, None] - places[None], axis=-1) + 9 * np.eye(len(places))
    assert gaps.min() > 0.54, "circles have a diameter of 0.54"


@pytest.mark.parametrize("name", ["svd", "low rank", "train", "vidal", "tucker", "cp", "array", "network", "value"])
def test_open_legs_are_the_shape(name: str) -> None:
    value = values()[name]
    legs = sorted(tnlib.draw(value).diagram.open_legs)
    shape = value.shape if hasattr(value, "shape") else (3, 4, 5)
    names = ["b0", "k0"] if name == "low rank" else [f"k{k}" for k in range(len(shape))]
    sizes = shape[::-1] if name == "low rank" else shape
    assert legs == list(zip(names, sizes, strict=True))


def test_open_legs_of_operators() -> None:
    assert sorted(tnlib.draw(values()["operator"]).diagram.open_legs) == [("b0", 4), ("b1", 5), ("k0", 3), ("k1", 4)]
    for name in ("terms", "factored terms"):
        assert sorted(tnlib.draw(values()[name]).diagram.open_legs) == [("b0", 4), ("b1", 5), ("k0", 4), ("k1", 5)]


def test_trains() -> None:
    tt = train([2, 3, 4, 3], 5)
    diagram = tnlib.draw(tt).diagram
    assert [n.label for n in diagram.nodes] == ["0", "1", "2", "3"]
    assert {n.kind for n in diagram.nodes} == {"tensor"}
    assert diagram.bonds == tuple((f"bond{k}", tt.ranks[k]) for k in (1, 2, 3))
    assert all(leg.towards is None for leg in diagram.legs)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(2, 4), min_size=2, max_size=6),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_triangles_point_to_the_centre_whether_it_is_named_or_not(
    sizes: list[int], rank: int, where: int, named: bool, operator: bool
) -> None:
    tt: Any = train(sizes, rank, seed=where)
    if operator:
        tt = tnlib.TTMatrix([np.stack([c, 2 * c], axis=2) for c in tt.cores])
    center = where % len(sizes)
    mixed = tnlib.canonicalize(tt, center)
    cores = [c * (3.7 if k == center else 1) for k, c in enumerate(mixed.cores)]  # the centre is no isometry
    diagram = tnlib.draw(type(tt)(cores, center if named else None)).diagram
    kinds = [n.kind for n in diagram.nodes]
    assert kinds == ["tensor" if k == center else "isometry" for k in range(len(sizes))]
    signs = [n.direction[0] if n.direction else 0 for n in diagram.nodes]
    assert signs == [float(np.sign(center - k)) for k in range(len(sizes))]
    bonds = [leg for leg in diagram.legs if leg.b is not None]
    assert [leg.towards for leg in bonds] == [k if k <= center else k - 1 for k in range(1, len(sizes))]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 5))
def test_a_random_gauge_leaves_no_triangle(seed: int, count: int) -> None:
    tt = tnlib.canonicalize(train([3] * count, 2, seed), count - 1)
    cores, g = list(tt.cores), rng(seed)
    for k in range(1, count):
        turn = g.standard_normal((cores[k].shape[0],) * 2) + 3 * np.eye(cores[k].shape[0])
        cores[k - 1] = cores[k - 1] @ turn
        cores[k] = np.tensordot(np.linalg.inv(turn), cores[k], 1)
    assert {n.kind for n in tnlib.draw(tnlib.TensorTrain(cores)).diagram.nodes} == {"tensor"}
    network = tnlib.network.to_network(tnlib.TensorTrain(cores))
    assert {n.kind for n in tnlib.draw(network).diagram.nodes} <= {"tensor", "matrix"}


def test_a_centre_that_is_not_one_is_not_believed() -> None:
    claimed = tnlib.TensorTrain(train([2, 3, 2], 2).cores, center=1)
    assert {n.kind for n in tnlib.draw(claimed).diagram.nodes} == {"tensor"}


def test_svd_and_low_rank_are_measured() -> None:
    a = rng().standard_normal((4, 6))
    u, s, vh = tnlib.svd(a).value
    assert [n.kind for n in tnlib.draw(tnlib.svd(a).value).diagram.nodes] == ["unitary", "weights", "isometry"]
    left, right = tnlib.draw(tnlib.LowRank(u[:, :2], s[:2, None] * vh[:2])).diagram.nodes
    assert (left.kind, left.direction, right.kind) == ("isometry", (1.0, 0.0), "matrix")
    right = tnlib.draw(tnlib.LowRank(u[:, :2] * s[:2], vh[:2])).diagram.nodes[1]
    assert (right.kind, right.direction) == ("isometry", (-1.0, 0.0))


def test_tucker_and_cp() -> None:
    tucker = tnlib.draw(values()["tucker"]).diagram
    assert [n.kind for n in tucker.nodes] == ["tensor", *["isometry"] * 3]
    for node in tucker.nodes[1:]:
        assert node.direction is not None
        assert np.dot(node.direction, node.position) < 0, "the tip points to the core"
    assert tucker.bonds == (("r0", 2), ("r1", 3), ("r2", 4))
    cp = tnlib.draw(values()["cp"]).diagram
    assert sorted(n.kind for n in cp.nodes) == ["delta", "matrix", "matrix", "matrix", "weights"]
    assert cp.bonds == (("R", 2),) * 4


def test_vidal_has_its_values_on_the_bonds() -> None:
    diagram = tnlib.draw(values()["vidal"]).diagram
    assert [n.kind for n in diagram.nodes].count("weights") == 2
    weights = [k for k, n in enumerate(diagram.nodes) if n.kind == "weights"]
    assert all(sum(k in (leg.a, leg.b) for leg in diagram.legs) == 2 for k in weights)


@pytest.mark.parametrize(("count", "center"), [(30, None), (31, None), (200, 100), (200, 3), (57, 56)])
def test_long_trains_are_shortened_and_say_by_how_much(count: int, center: int | None) -> None:
    tt = train([2] * count, 2)
    tt = tt if center is None else tnlib.canonicalize(tt, center)
    nodes = tnlib.draw(tt).diagram.nodes
    left_out = sum(int(n.label.split()[0]) for n in nodes if n.kind == "ellipsis")
    shown = [int(n.label) for n in nodes if n.kind != "ellipsis"]
    assert len(shown) + left_out == count
    assert len(nodes) <= 30
    assert shown == sorted(shown)
    assert {0, count - 1, *(() if center is None else (center,))} <= set(shown)


def test_the_steps_of_a_sweep() -> None:
    x = rng().standard_normal((3, 4, 5, 2))
    tt = tnlib.tt_svd(x).value
    steps = sweep_steps(tt)
    assert list(steps) == ["dense", "step 1", "step 2", "step 3"]
    for done, step in enumerate(steps.values()):
        assert [n.kind for n in step.nodes] == [*["isometry"] * done, "tensor"]
        assert step.bonds == tuple((f"bond{k}", tt.ranks[k]) for k in range(1, done + 1))
        assert step.open_legs == tuple((f"k{k}", n) for k, n in enumerate(x.shape))
    assert [step.title for step in (steps["dense"], steps["step 3"])] == [
        f"{x.size} numbers",
        f"{tt.n_parameters} numbers",
    ]
    assert len(tnlib.draw(steps).diagram.nodes) == 1 + 2 + 3 + 4 + len(steps)
    for wrong, words in ((tnlib.canonicalize(tt, 0), "core 0 that is no isometry"), (train([2], 1), "got 1")):
        with pytest.raises(tnlib.ArgumentError, match=words):
            sweep_steps(wrong)


def test_networks() -> None:
    cp = tnlib.draw(tnlib.network.to_network(values()["cp"])).diagram
    assert sorted(n.kind for n in cp.nodes) == ["delta", "matrix", "matrix", "matrix", "weights"]
    spelled = tnlib.draw(tnlib.network.spell_out(tnlib.network.to_network(values()["cp"]))).diagram
    assert [n.kind for n in spelled.nodes].count("delta") == 1
    mixed = tnlib.canonicalize(train([3, 3, 3, 3, 3], 2), 2)
    nodes = tnlib.draw(tnlib.network.to_network(mixed)).diagram.nodes
    assert [n.direction and n.direction[0] > 0 for n in nodes] == [True, True, None, False, False]
    peps = tnlib.draw(qtn.PEPS.rand(2, 3, bond_dim=2, seed=0)).diagram
    assert len({n.position[0] for n in peps.nodes}) == 3
    assert len({n.position[1] for n in peps.nodes}) == 2
    assert len(peps.bonds) == 7


def test_long_chains_of_quimb_are_in_rows_and_their_norms_in_two() -> None:
    mixed = tnlib.canonicalize(train([3] * 23, 2), 15)
    nodes = tnlib.draw(tnlib.network.to_network(mixed)).diagram.nodes
    assert {n.kind for n in nodes[1:15]} == {"isometry"}
    assert all(n.direction is None or n.direction[1] == 0 for n in nodes), "also where a row ends"
    assert [n.direction and n.direction[0] > 0 for n in nodes[6:18]] == [True] * 9 + [None] + [False] * 2
    assert len({n.position[1] for n in nodes}) == 3
    ket = tnlib.network.to_network(tnlib.tt_svd(rng().standard_normal((2, 3, 2))).value)
    norm = tnlib.draw(ket | ket.H.reindex({f"bond{k}": f"c{k}" for k in (1, 2)})).diagram
    assert [n.position[1] for n in norm.nodes[:3]] == [0, 0, 0]
    assert {n.position[1] for n in norm.nodes[3:]} == {norm.nodes[3].position[1]} != {0}
    assert norm.open_legs == ()


def test_thicker_is_larger() -> None:
    widths = [thickness(n) for n in (1, 2, 64, 768, 50257)]
    assert widths == sorted(set(widths))


def test_own_diagrams_and_bubbles() -> None:
    class Layer:
        def diagram(self) -> Diagram:
            nodes = (Node("matrix", "W", (0, 0)), Node("tensor", "x", (1, 0)))
            legs = (Leg(0, 1, "d", 8), Leg(0, None, "out", 4, (-1, 0)))
            return Diagram(nodes, legs, bubbles=(Bubble((0, 1), "relu"),))

    picture = tnlib.draw(Layer())
    assert picture.diagram == Layer().diagram()
    assert "relu" in {text.get_text() for text in picture.figure.axes[0].texts}
    both = tnlib.draw({"one": Layer(), "two": Layer()}).diagram
    assert len(both.bubbles) == 2
    assert both.bubbles[1].nodes == (4, 5), "a title is a node too"
    assert [n.label for n in both.nodes if n.kind == "text"] == ["one", "two"]


BAD = {
    "a number": (lambda: tnlib.draw(3), "draw: value must be a format.*got int"),
    "a string": (lambda: tnlib.draw("x"), "got str"),
    "a fit": (lambda: tnlib.draw(tnlib.tt_svd(np.ones((2, 2)))), "got Fit; draw its .value"),
    "nothing": (lambda: tnlib.draw([]), "at least one"),
    "not finite": (lambda: tnlib.draw(np.array([np.nan])), "must be finite"),
    "kind": (lambda: Node("star", "", (0, 0)), "kind must be one of"),
    "kinds": (lambda: Node(np.ones(2), "", (0, 0)), "kind must be one of"),  # type: ignore[arg-type]
    "no direction": (lambda: Node("isometry", "", (0, 0)), "direction must be given"),
    "place": (lambda: Node("tensor", "", (0, float("nan"))), "position must be finite"),
    "no place": (lambda: Node("tensor", "", None), "position must be a pair"),  # type: ignore[arg-type]
    "free end": (lambda: Leg(0, None, "i", 2), "end must be given"),
    "size": (lambda: Leg(0, 1, "i", 0), "size must be a positive integer"),
    "arrow": (lambda: Leg(0, 1, "i", 2, towards=2), "towards must be one of"),
    "a node by its name": (lambda: Leg("a", 1), "a must be the number of a node, got 'a'"),  # type: ignore[arg-type]
    "nodes by name": (lambda: Bubble("a", "f"), "nodes must be a tuple of numbers"),  # type: ignore[arg-type]
    "points": (lambda: Leg(0, 1, via=None), "via must be a tuple of points"),  # type: ignore[arg-type]
    "no legs": (lambda: Diagram((), None), "legs must be a tuple of Leg, got None"),  # type: ignore[arg-type]
    "other legs": (lambda: Diagram((), ("i",)), "legs must be a tuple of Leg, got 'i'"),  # type: ignore[arg-type]
    "nowhere": (lambda: Diagram((), ()).moved(None, 0), "must be a pair of numbers"),  # type: ignore[arg-type]
    "joined": (lambda: join(np.ones(2)), "join: diagrams must be a tuple of Diagram"),  # type: ignore[arg-type]
    "no node": (lambda: Diagram((Node("tensor", "", (0, 0)),), (Leg(0, 1),)), "nodes from 0 to 0, got 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_sentence(case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(tnlib.TnlibError, match=words):
        call()


def test_bad_paths_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    picture = tnlib.draw(np.ones(3))
    with pytest.raises(tnlib.ArgumentError, match=r"must end in \.svg or \.png, got a\.pdf"):
        picture.save(tmp_path / "a.pdf")
    with pytest.raises(tnlib.MissingFileError, match="folder"):
        picture.save(tmp_path / "none" / "a.svg")
    with pytest.raises(tnlib.ArgumentTypeError, match="must be a path"):
        picture.save(3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_describing_loads_no_library_for_drawing() -> None:
    code = (
        "import sys, numpy as np, tnlib; t = tnlib.draw(tnlib.tt_svd(np.ones((2, 2))).value).diagram;"
        "print([m for m in ('matplotlib', 'quimb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
