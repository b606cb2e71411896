"""transformers itself: imported late, as it is an extra, and kept from speaking of models that are not the caller's."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autopar.base.errors import AutoparError


def library() -> Any:
    """The module. Raises AutoparError where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise AutoparError(
            "This model needs transformers, which is not installed", remedy="pip install 'autopar[hf]'"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Errors only from transformers for the duration, of what this thread does."""
    thread = threading.get_ident()

    def is_heard(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.ERROR

    handlers = list(library().logging.get_logger().handlers)
    for handler in handlers:
        handler.addFilter(is_heard)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_heard)
