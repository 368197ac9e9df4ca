"""Files that `Picture.save` refuses to write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tnlib


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
