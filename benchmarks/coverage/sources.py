"""The texts of transformers that the sweep saw: another version may write a model otherwise, under the same name.

    python benchmarks/coverage/sources.py

writes what the installed version has to benchmarks/results/architectures_sources.json, as a whole sweep does.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch import nn

from benchmarks.pages import RESULTS
from benchmarks.proofs.matrix import write_whole

SEEN = RESULTS / "architectures_sources.json"
VERSION = "transformers"
"""The key of the version; the others are files of models: `aria/modeling_aria.py`."""


def write(path: Path = SEEN) -> None:
    """Keep digests of the installed version's models."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    files = {path.relative_to(folder).as_posix(): _digest(path) for path in folder.glob("*/modeling_*.py")}
    known = {VERSION: transformers.__version__, **dict(sorted(files.items()))}
    write_whole(path, json.dumps(known, indent=0) + "\n")


def is_older(path: Path = SEEN) -> bool:
    """Whether the installed transformers is of before the one that was swept."""
    import transformers

    return _numbers(transformers.__version__) < _numbers(json.loads(path.read_text())[VERSION])


def written_otherwise(model: nn.Module, path: Path = SEEN) -> list[str]:
    """The files that a model's modules are from, `aria/modeling_aria.py`, that are others than the sweep saw."""
    known = json.loads(path.read_text())
    loaded = {sys.modules[type(each).__module__] for each in model.modules()}
    files = [
        Path(each.__file__) for each in loaded if each.__file__ and each.__name__.startswith("transformers.models.")
    ]
    names = {file.relative_to(file.parents[1]).as_posix(): file for file in files}
    return sorted(name for name, file in names.items() if known.get(name) != _digest(file))


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:12]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in version.split(".")[:2])


if __name__ == "__main__":
    write()
