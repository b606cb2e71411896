"""Commands of `autopar`, run in this process, and errors as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from autopar.base.errors import AutoparError
from autopar.cli.main import app


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command that ends with this exit code."""
    result = _result(arguments, code)
    return result.stdout, result.stderr


def output(*arguments: object, code: int = 0) -> str:
    """Both as a terminal shows them."""
    return _result(arguments, code).output


def _result(arguments: Sequence[object], code: int) -> Result:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def error_of(function: Any, *args: Any, **options: Any) -> str:
    """What the AutoparError of a call says."""
    with pytest.raises(AutoparError) as caught:
        function(*args, **options)
    return str(caught.value)
