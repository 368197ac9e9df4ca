"""The commands in the process of the test."""

from __future__ import annotations

from click.testing import CliRunner, Result
from tnlib_adapters.cli import main


def run_command(*arguments: object, status: int = 0, columns: int = 120) -> Result:
    """Output of `tnlib` with these arguments; another exit status fails, with the output and the exception."""
    result = CliRunner().invoke(main, [str(one) for one in arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == status, f"status {result.exit_code}, {result.exception!r}: {result.output}"
    return result
