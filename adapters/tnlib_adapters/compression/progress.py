"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress."""
