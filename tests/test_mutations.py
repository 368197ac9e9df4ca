"""The table of `make mutate` fits the tree: every line is there once, and every test is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from mutations.__main__ import LEAST, ROOT, position
from mutations.table import MUTATIONS, Mutation


def functions(path: str) -> Iterator[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return (node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_line_and_every_test_is_there() -> None:
    assert len(MUTATIONS) == 50 == LEAST + 2
    for mutation in MUTATIONS:
        position(mutation)
        assert mutation.tests
        for path, _, name in (test.partition("::") for test in mutation.tests):
            assert name in ("", *functions(path)), f"{path} has no {name}"


def test_a_line_that_has_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"pyproject\.toml has this line 0 times: no such line"):
        position(Mutation("pyproject.toml", "no such line", "", ()))
