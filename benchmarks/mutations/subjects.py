"""Plans that are made, checked and verified to find a fault: small models under every kind of strategy, in one process.

    python benchmarks/mutations/subjects.py        a line of JSON for each: what the checker says, what the proof says

After the first whose proof fails the others are only checked, until one does not pass. `""`: nothing was found; `"-"`:
not asked, as there was no plan. With the word `modules`: the modules that a first one has loaded.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar
from autopar.cli.models import catalogue


@dataclass(frozen=True, slots=True)
class Subject:
    """A tiny model of the catalogue in training mode, on a mesh. labels: whether rows ignore different numbers."""

    model: str
    mesh: str
    strategy: str | Mapping[str, str]
    dropout: float = 0.0
    labels: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        how = self.strategy if isinstance(self.strategy, str) else "+".join(self.strategy.values())
        return f"{self.model} {self.mesh} {how}"

    def plan(self) -> autopar.Plan:
        plain = self.model in catalogue.PLAIN
        loaded = catalogue.load(self.model, tiny=True, device="cpu", dropout=None if plain else self.dropout)
        loaded.model.train()
        labels = loaded.batch.get("labels")
        if self.labels and labels is not None:
            for row in range(labels.shape[0]):
                labels[row, labels.shape[1] - 1 - row :] = -100
        mesh = autopar.Mesh.parse(self.mesh, hardware="cpu")
        return autopar.plan(
            loaded.model, mesh, example_inputs=loaded.batch, strategy=self.strategy, **dict(self.options)
        )


SUBJECTS = (
    Subject("gpt2", "tp=2", "tensor", dropout=0.2),
    Subject("gpt2", "dp=2", "ddp", dropout=0.2, labels=True, options={"microbatches": 2}),
    Subject("llama", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}, labels=True),
    Subject("cnn", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}),
    Subject("gpt2", "pp=2,dp=2", {"pp": "zero_bubble", "dp": "zero2"}, labels=True, options={"microbatches": 4}),
    Subject("llama", "cp=2", {"cp": "ring"}),
)


def checked(plan: autopar.Plan) -> str:
    """What the checker of generated programs says is wrong; "" for nothing."""
    try:
        plan.check()
    except autopar.AutoparError as error:
        return str(error).splitlines()[0][:200]
    return ""


def tried(subject: Subject, verifies: bool) -> dict[str, str]:
    """What was found of one subject."""
    found = {"subject": str(subject), "checker": "-", "verify": ""}
    try:
        plan = subject.plan()
        found["checker"] = checked(plan)
        if not verifies:
            return found
        proof = plan.verify()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        first = (str(error).splitlines() or [""])[0]
        return found | {"verify": f"{type(error).__name__} in {place}: {first}"[:200]}
    if not proof.ok:
        found["verify"] = f"{proof.worst.name} differs by {proof.worst.error:.1e}"
    return found


def main() -> int:
    if sys.argv[1:] == ["modules"]:
        SUBJECTS[0].plan().verify()
        print("modules that were loaded:", *sorted(sys.modules))
        return 0
    os.environ["AUTOPAR_CHECK"] = "0"  # else no plan is given out that the checker refuses
    caught: dict[str, bool] = dict.fromkeys(("checker", "verify"), False)
    for subject in SUBJECTS:
        found = tried(subject, not caught["verify"])
        print(json.dumps(found), flush=True)
        for net in caught:
            caught[net] |= found[net] not in ("", "-")
        if all(caught.values()):
            break
    return int(caught["verify"])


if __name__ == "__main__":
    sys.exit(main())
