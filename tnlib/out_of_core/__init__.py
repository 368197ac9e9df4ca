"""Decompositions of arrays that exceed memory: sources read by tiles, passes over them, and files in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tnlib._validate import is_stored

if TYPE_CHECKING:
    from tnlib.out_of_core.storage import Storage


def open_large(
    function: str, parameter: str, x: Any, storage: Storage | None, call: Mapping[str, Any], *, one_read: bool = True
) -> tuple[Any, Any]:
    """Return `open_array`, or `open_passes` without `one_read`; their modules are imported for large arrays alone."""
    if storage is None and not is_stored(x):
        return None, x
    from tnlib.out_of_core.open_array import open_array, open_passes

    return (open_array if one_read else open_passes)(function, parameter, x, storage, call)
