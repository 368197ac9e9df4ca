"""Positions of nodes in chains, and angles of open legs."""

from __future__ import annotations

import itertools

import pytest

from tnlib.drawing.layout import ChainRows, fan, point_towards


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (10, 1), (11, 2), (30, 3)])
def test_rows_are_read_like_text(count: int, rows: int) -> None:
    chain = ChainRows.of_cores(count, 1.3, is_operator=False)
    points = [chain.position(k) for k in range(count)]
    assert len({y for _, y in points}) == rows
    assert points == sorted(points, key=lambda p: (-p[1], p[0]))
    for k, (p, q) in enumerate(itertools.pairwise(points)):
        assert len(chain.bond_points(k)) == (0 if p[1] == q[1] else 4)


def test_a_fan_begins_at_the_top_on_both_sides() -> None:
    for angle in (0.0, 3.14159):
        ends = [leg.end for leg in fan(0, (2, 0, 1), (4, 5, 6), (0.0, 0.0), angle)]
        assert [leg.size for leg in fan(0, (2, 0, 1), (4, 5, 6), (0.0, 0.0), angle)] == [6, 4, 5]
        heights = [end[1] for end in ends if end is not None]
        assert heights == sorted(heights, reverse=True)


def test_a_point_towards_its_own_start_is_below() -> None:
    assert point_towards((1.0, 1.0), (4.0, 5.0), 10.0) == (7.0, 9.0)
    assert point_towards((1.0, 1.0), (1.0, 1.0), 0.5) == (1.0, 0.5)
