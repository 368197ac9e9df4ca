"""Draw: every kind of value with its legs, files, equations and sweeps."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import quimb.tensor as qtn
from random_trains import train
from slow_cases import mostly_slow

import tnlib
from tnlib.drawing import Bubble, Diagram, Leg, Node, einsum_diagram, equation, sweep_steps

X = np.random.default_rng(0).standard_normal((3, 4, 5))


def low_rank(m: int, r: int, n: int) -> tnlib.LowRank:
    return tnlib.LowRank(np.random.default_rng(1).standard_normal((m, r)), np.ones((r, n)))


VALUES = {
    "svd": lambda: tnlib.svd(X, left=(0, 2)).value,
    "low rank": lambda: low_rank(6, 2, 5),
    "train": lambda: tnlib.tt_svd(X).value,
    "one core": lambda: tnlib.TensorTrain([np.ones((1, 3, 1))]),
    "zero": lambda: tnlib.tt_svd(np.zeros((2, 3, 2))).value,
    "long train": lambda: train((2,) * 57, 3),
    "operator": lambda: tnlib.ttm_svd(X.reshape(12, 5) @ X.reshape(5, 12), (3, 4), (4, 3)).value,
    "vidal": lambda: tnlib.vidal(tnlib.tt_svd(X).value),
    "tucker": lambda: tnlib.tucker(X, ranks=(2, 3, 4)).value,
    "cp": lambda: tnlib.CP(np.ones(2), [np.ones((n, 2)) for n in X.shape]),
    "terms": lambda: tnlib.KroneckerTerms(X[:, :, :4], [np.eye(5)] * 3),
    "factored terms": lambda: tnlib.KroneckerTerms(X[:, :, :4], [low_rank(5, 2, 5)] * 3),
    "array": lambda: X,
    "vector": lambda: np.ones(3),
    "complex": lambda: tnlib.tt_svd((X + 1j * X[::-1]).astype(np.complex64)).value,
    "network": lambda: tnlib.interop.quimb.to_network(tnlib.tt_svd(X).value),
    "lattice": lambda: qtn.PEPS.rand(2, 3, bond_dim=2, seed=0),
    "loop": lambda: qtn.TN_rand_reg(6, 3, 2, phys_dim=2, seed=1),
    "no legs": lambda: qtn.TN_rand_reg(4, 3, 2, seed=1),
    "network format": lambda: tnlib.interop.quimb.Network(tnlib.interop.quimb.to_network(tnlib.tt_svd(X).value)),
    "several": lambda: [tnlib.tt_svd(X).value, tnlib.canonicalize(tnlib.tt_svd(X).value, 0)],
}


@pytest.mark.parametrize("name", mostly_slow(VALUES, [*VALUES][::8]))
def test_files_are_complete_and_reproducible(name: str, tmp_path: Path) -> None:
    picture = tnlib.draw(VALUES[name]())
    picture.save(tmp_path / "a.png")
    picture.save(str(tmp_path / "a.svg"))
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "a.png").read_bytes()[-8:-4] == b"IEND"
    assert ElementTree.fromstring((tmp_path / "a.svg").read_text()).tag.endswith("svg")
    assert picture._repr_svg_() == (tmp_path / "a.svg").read_text()
    assert tnlib.draw(VALUES[name]())._repr_svg_() == picture._repr_svg_(), "equal values, equal files"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg"]


@pytest.mark.parametrize("name", VALUES)
def test_everything_is_inside_the_figure_and_nodes_do_not_overlap(name: str) -> None:
    picture = tnlib.draw(VALUES[name]())
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


@pytest.mark.parametrize("name", VALUES)
def test_labels_are_legible(name: str) -> None:
    """They have 9 points, 12 pixels on a page, and none lies on another."""
    axes = tnlib.draw(VALUES[name]()).figure.axes[0]
    texts = [text for text in axes.texts if text.get_text()]
    assert min(float(text.get_fontsize()) for text in texts) >= 9.0
    for one, other in itertools.combinations(texts, 2):
        (x0, y0), (x1, y1) = one.get_window_extent().get_points()
        (u0, v0), (u1, v1) = other.get_window_extent().get_points()
        points = 72 / axes.figure.dpi
        overlap = points * (min(x1, u1) - max(x0, u0)), points * (min(y1, v1) - max(y0, v0))
        assert min(overlap) < 1.0, f"{one.get_text()!r} lies on {other.get_text()!r}"


@pytest.mark.parametrize("name", ["svd", "train", "vidal", "tucker", "cp", "array", "network", "network format"])
def test_open_legs_are_the_shape(name: str) -> None:
    assert sorted(tnlib.draw(VALUES[name]()).diagram.open_legs) == [("k0", 3), ("k1", 4), ("k2", 5)]


def test_values_with_a_method_diagram_and_titles() -> None:
    class Layer:
        def diagram(self) -> Diagram:
            nodes = (Node("matrix", "W", (0, 0)), Node("tensor", "x", (1, 0)))
            legs = (Leg(0, 1, "d", 8), Leg(0, None, "out", 4, (-1, 0)))
            return Diagram(nodes, legs, bubbles=(Bubble((0, 1), "relu"),))

    picture = tnlib.draw(Layer())
    assert picture.diagram == Layer().diagram()
    assert "relu" in {text.get_text() for text in picture.figure.axes[0].texts}
    both = tnlib.draw({"first": Layer(), "second": Layer()}).diagram
    assert len(both.bubbles) == 2
    assert both.bubbles[1].nodes == (4, 5), "a title is a node too"
    assert [n.label for n in both.nodes if n.kind == "text"] == ["first", "second"]
    titles = tnlib.draw({"array": X}).diagram.nodes[0].label, tnlib.draw([X]).diagram.nodes[0].label
    assert titles == ("array: 3 x 4 x 5, dense", "3 x 4 x 5, dense")


BAD: dict[str, tuple[Any, str]] = {
    "a number": (3, "draw: value must be a format.*got int"),
    "a string": ("x", "got str"),
    "a fit": (tnlib.tt_svd(np.ones((2, 2))), "got Fit; draw its .value"),
    "nothing": ([], "at least one"),
    "not finite": (np.array([np.nan]), "must be finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_sentence(case: str) -> None:
    value, words = BAD[case]
    with pytest.raises(tnlib.TnlibError, match=words):
        tnlib.draw(value)


def test_a_diagram_is_made_without_matplotlib_and_quimb() -> None:
    code = (
        "import sys, numpy as np, tnlib; t = tnlib.draw(tnlib.tt_svd(np.ones((2, 2))).value).diagram;"
        "print([m for m in ('matplotlib', 'quimb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_bad_paths_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    picture = tnlib.draw(np.ones(3))
    with pytest.raises(tnlib.ArgumentError, match=r"must end in \.svg or \.png, got a\.pdf"):
        picture.save(tmp_path / "a.pdf")
    with pytest.raises(tnlib.MissingFileError, match="folder"):
        picture.save(tmp_path / "none" / "a.svg")
    with pytest.raises(tnlib.ArgumentTypeError, match="must be a path"):
        picture.save(3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(tnlib.ArgumentError, match="must name a file"):
        picture.save(tmp_path / "folder.svg")


def test_the_repr_counts_nodes_and_legs() -> None:
    assert repr(tnlib.draw(np.ones((2, 3)))) == "Picture of 2 x 3, dense: 1 nodes, 2 legs"


def test_parts_of_an_equation_do_not_overlap() -> None:
    tucker, svd = tnlib.tucker(X, ranks=(2, 2, 2)).value, tnlib.svd(X[0]).value
    diagram = equation(einsum_diagram("ijk->ijk", {"x": X}), "=", tucker, "+", svd, title="two")
    assert isinstance(diagram, Diagram)
    assert diagram.title == "two"
    spans, first = [], 0
    for count in (1, 1, 4, 1, 3):
        xs = [node.position[0] for node in diagram.nodes[first : first + count]]
        xs += [leg.end[0] for leg in diagram.legs if leg.end is not None and first <= leg.a < first + count]
        spans.append((min(xs), max(xs)))
        first += count
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


def test_an_empty_diagram_takes_no_height() -> None:
    assert [node.label for node in equation(Diagram((), ()), "=", np.ones(2)).nodes] == ["=", ""]


def test_an_equation_of_signs_alone_is_refused() -> None:
    with pytest.raises(tnlib.ArgumentError, match="at least one value"):
        equation("=", "+")


def test_every_step_adds_an_isometry() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5, 2))
    tt = tnlib.tt_svd(x).value
    steps = sweep_steps(tt)
    assert list(steps) == ["dense", "step 1", "step 2", "step 3"]
    for n_isometries, step in enumerate(steps.values()):
        assert [n.kind for n in step.nodes] == [*["isometry"] * n_isometries, "tensor"]
        assert step.bonds == tuple((f"bond{k}", tt.ranks[k]) for k in range(1, n_isometries + 1))
        assert step.open_legs == tuple((f"k{k}", n) for k, n in enumerate(x.shape))
    assert steps["dense"].title == f"{x.size} parameters"
    assert steps["step 3"].title == f"{tt.n_parameters} parameters"
    assert len(tnlib.draw(steps).diagram.nodes) == 1 + 2 + 3 + 4 + len(steps)


def test_other_trains_are_refused() -> None:
    train, short = tnlib.canonicalize(tnlib.tt_svd(X).value, 0), VALUES["one core"]()
    for value, words in ((train, "core 0 that is no isometry"), (short, "got 1")):
        with pytest.raises(tnlib.ArgumentError, match=words):
            sweep_steps(value)
    with pytest.raises(tnlib.ArgumentTypeError, match="sweep_steps: tt must be a TensorTrain, got a ndarray"):
        sweep_steps(np.ones((2, 3)))
