"""A painted diagram: a figure, a file, a picture in a notebook."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tnlib._errors import ArgumentError, MissingFileError
from tnlib._validate import as_path
from tnlib.drawing.graph import Diagram
from tnlib.io import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png")


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """What `draw` returns: notebooks show it, `save` writes it.

    Parameters
    ----------
    diagram
        What it shows.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> picture = tnlib.draw(tnlib.tt_svd(np.ones((4, 5, 6))).value)
    >>> picture, picture.diagram.bonds
    (Picture of TensorTrain, 4 x 5 x 6: 3 nodes, 5 legs, (('bond1', 1), ('bond2', 1)))
    """

    diagram: Diagram

    def __repr__(self) -> str:
        of = f" of {self.diagram.title}" if self.diagram.title else ""
        return f"Picture{of}: {len(self.diagram.nodes)} nodes, {len(self.diagram.legs)} legs"

    @cached_property
    def figure(self) -> Figure:
        """The matplotlib Figure; it belongs to no window."""
        from tnlib.drawing.paint import paint

        return paint(self.diagram)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an SVG or a PNG, as the name of the file says; it appears whole or not at all.

        Parameters
        ----------
        path
            Ends in .svg or .png; an existing file is replaced.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If `path` is no path or ends otherwise.
        MissingFileError
            If its folder does not exist.
        """
        target = as_path("Picture.save", "path", path)
        kind = target.suffix.lower()
        if kind not in _FORMATS:
            raise ArgumentError(f"Picture.save: path must end in .svg or .png, got {target.name}; rename it.")
        if not target.absolute().parent.is_dir():
            raise MissingFileError(
                f"Picture.save: the folder of path must exist, found none at {target.parent}; make it first."
            )
        write_whole(target, self._bytes(kind[1:]))

    def _repr_svg_(self) -> str:
        return self._bytes("svg").decode()

    def _bytes(self, kind: str) -> bytes:
        import matplotlib as mpl

        out = io.BytesIO()
        # without a date and with fixed ids the same diagram is the same file
        with mpl.rc_context({"svg.hashsalt": "tnlib"}):
            self.figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
        return out.getvalue()
