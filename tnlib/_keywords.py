"""Keywords of other libraries, answered with those of tnlib."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tnlib._errors import ArgumentTypeError

P = ParamSpec("P")
R = TypeVar("R")

_CAP, _TOLERANCE = ("max_rank", "rank"), ("rtol",)
_OURS = dict.fromkeys(("max_bond", "chi_max", "rank", "ranks", "rmax"), _CAP) | dict.fromkeys(
    ("cutoff", "eps", "tol", "rel"), _TOLERANCE
)


def refuse_foreign_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with an error that names its own keyword where one of another library is passed."""
    code = function.__code__
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    ours = {name: next((k for k in known if k in own), None) for name, known in _OURS.items() if name not in own}

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() & ours.keys():
            advice = f"pass {ours[name]}= instead" if ours[name] else "leave it out"
            raise ArgumentTypeError(f"{function.__name__}: keywords must be those of tnlib, got {name}=; {advice}.")
        return function(*args, **kwargs)

    return run
