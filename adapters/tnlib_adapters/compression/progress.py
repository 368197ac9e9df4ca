"""Progress callbacks of long work, and the names of its stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

Progress = Callable[[str, int, int], None]  # (stage, done, total)


class Stage(str):
    """Name of a stage of long work, for a progress bar, with what is being done and the tokens that a step passes.

    Parameters
    ----------
    name
        The string; equal for all steps of a stage.
    detail
        The current part, such as "block 7 of 22"; "" for none.
    tokens
        Mean number of tokens that pass a block, or a model, in a step; 0 without a text.

    Examples
    --------
    >>> stage = Stage("collecting statistics", "block 7 of 22", 1024)
    >>> stage == "collecting statistics", stage.detail
    (True, 'block 7 of 22')
    """

    detail: str
    tokens: int

    def __new__(cls, name: str, detail: str = "", tokens: int = 0) -> Self:
        """Return the string with its attributes."""
        stage = super().__new__(cls, name)
        stage.detail, stage.tokens = detail, tokens
        return stage


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress."""
