"""Pictures of diagrams: matplotlib figures, SVG and PNG files, notebook output."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tnlib._errors import ArgumentError
from tnlib._files import write_whole
from tnlib._validate import as_target
from tnlib.drawing.diagram import Diagram

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png")


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """A diagram that notebooks show and `save` writes to a file; the result of `draw`.

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
        """The matplotlib Figure, outside pyplot."""
        from tnlib.drawing.paint import paint

        return paint(self.diagram)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an SVG or PNG file, atomically; `path` ends in .svg or .png, and an existing file is replaced."""
        target = as_target("Picture.save", path)
        kind = target.suffix.lower()
        if kind not in _FORMATS:
            raise ArgumentError(f"Picture.save: path must end in .svg or .png, got {target.name}; rename it.")
        write_whole(target, self._bytes(kind[1:]))

    def _repr_svg_(self) -> str:
        return self._bytes("svg").decode()

    def _bytes(self, kind: str) -> bytes:
        import matplotlib as mpl

        buffer = io.BytesIO()
        # Without a date and with fixed ids, equal diagrams give equal files.
        with mpl.rc_context({"svg.hashsalt": "tnlib"}):
            self.figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
        return buffer.getvalue()
