"""What was worked out last, by what decides it: bounded, and shared by the threads of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """The last `most` values that were asked for. For keys that `functools.lru_cache` could not make of arguments."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[Key, Value] = {}
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key, made where it is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept[key] = value = self._kept.pop(key)
                return value
        value = make()
        self.put(key, value)
        return value

    def peek(self, key: Key) -> Value | None:
        """The value of a key; None where it is not kept."""
        with self._lock:
            return self._kept.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Keep a value."""
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
