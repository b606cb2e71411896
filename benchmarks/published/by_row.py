"""What back-tests that plan row by row share: their options, predictions that are kept, the page."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from autopar.base.errors import AutoparError
from benchmarks import pages


class Named(Protocol):
    """A published row: what it is called in its file."""

    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=Named)
P = TypeVar("P")


@dataclass(frozen=True)
class Backtest(Generic[R, P]):
    """A file of rows, how one is predicted, and the page `name`.

    load: rows, and the file's data. predict: of a row, with so many blocks or all of them. kept: the type of a
    prediction, a dataclass. said: a row in words, for --list. page: of all rows, the data, and predictions by row.
    """

    name: str
    load: Callable[[], tuple[list[R], dict[str, Any]]]
    predict: Callable[[R, int | None], P]
    kept: Callable[..., P]
    said: Callable[[R], str]
    page: Callable[[Sequence[R], Mapping[str, Any], Mapping[str, P]], str]

    def main(self, description: str | None) -> None:
        """Read the command line; print the page, and write it where that is asked for."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--only", default="*", help="patterns of row names, split by commas")
        parser.add_argument("--list", action="store_true", help="show the rows and plan nothing")
        parser.add_argument("--layers", type=int, help="plan with so many blocks, to see what can be expressed")
        parser.add_argument("--json", type=Path, help="keep predictions in this file, and make none of them again")
        parser.add_argument("--write", action="store_true", help="a dated file under benchmarks/results")
        options = parser.parse_args()
        rows, data = self.load()
        rows = [row for row in rows if any(fnmatch.fnmatch(row.id, each) for each in options.only.split(","))]
        if options.list:
            print("\n".join(f"{row.id}: {self.said(row)}" for row in rows))
            return
        text = self.page(rows, data, self.predictions(rows, options.layers, options.json))
        print(text)
        if options.write:
            pages.write(f"backtest-{self.name}", text)

    def predictions(self, rows: Sequence[R], layers: int | None, path: Path | None) -> dict[str, P]:
        """By row: those in the file, and those made now; a row that cannot be planned is told and left out."""
        found = {each["id"]: self.kept(**each) for each in pages.kept(path)}
        for row in rows:
            if row.id in found:
                continue
            try:
                made = found[row.id] = self.predict(row, layers)
            except AutoparError as error:
                print(f"{row.id}: {' '.join(str(error).split())[:400]}", file=sys.stderr, flush=True)
                continue
            print(json.dumps(asdict(made)), file=sys.stderr, flush=True)  # type: ignore[call-overload]
            pages.keep(path, made)
        return found
