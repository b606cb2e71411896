"""Plans that are made, checked and verified to find a fault: small models under every kind of strategy, in one process.

    python benchmarks/mutations/subjects.py [KNOWN]      a line of JSON for each: what the checker and the proof say

After the first whose proof fails the others are only checked, until one does not pass. `""`: nothing was found; `"-"`:
not asked, as there was no plan. `text` and `meaning` are digests of the program with its border, and of what was
planned. KNOWN: a file with those of nothing planted, by subject: what is the same is not proven again. With the word
`modules`: the modules that a first one has loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar
from autopar.cli.models import catalogue


@dataclass(frozen=True, slots=True)
class Subject:
    """A tiny model in training mode, on a mesh.

    model: of the catalogue, or `module:callable`. labels: whether rows ignore different numbers of them, the last two
    all. rows: of the batch.
    """

    model: str
    mesh: str
    strategy: str | Mapping[str, str]
    dropout: float = 0.0
    labels: bool = False
    rows: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        how = self.strategy if isinstance(self.strategy, str) else "+".join(self.strategy.values())
        return f"{self.model.rpartition(':')[2]} {self.mesh} {how}"

    def plan(self) -> autopar.Plan:
        loaded = catalogue.load(self.model, **self._settings())
        loaded.model.train()
        labels = loaded.batch.get("labels")
        if self.labels and labels is not None:
            for row in range(labels.shape[0]):
                labels[row, 0 if row >= 6 else labels.shape[1] - 1 - row :] = -100
        mesh = autopar.Mesh.parse(self.mesh, hardware="cpu")
        return autopar.plan(
            loaded.model, mesh, example_inputs=loaded.batch, strategy=self.strategy, **dict(self.options)
        )

    def _settings(self) -> dict[str, Any]:
        """Of a model that does not make its own batch."""
        if ":" in self.model:
            return {}
        found: dict[str, Any] = {"tiny": True, "device": "cpu"} | ({"batch": (self.rows, 16)} if self.rows != 8 else {})
        return found if self.model in catalogue.PLAIN else found | {"dropout": self.dropout}


SUBJECTS = (
    Subject("gpt2", "tp=2", "tensor", dropout=0.2),
    Subject("gpt2", "dp=2", "ddp", dropout=0.2, labels=True, options={"microbatches": 2}),
    Subject("llama", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}, labels=True),
    Subject("cnn", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}),
    Subject("gpt2", "pp=2,dp=2", {"pp": "zero_bubble", "dp": "zero2"}, labels=True, options={"microbatches": 4}),
    Subject("llama", "cp=2", {"cp": "ring"}),
    Subject("gpt2", "pp=2", {"pp": "zbv"}, dropout=0.2, labels=True, options={"microbatches": 4}),
    Subject("gpt2", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor+sequence"}, dropout=0.2, options={"microbatches": 2}),
    Subject("gpt2", "dp=3", "zero3", labels=True, rows=6),
    Subject("llama", "dp=2,cp=2", {"dp": "zero3", "cp": "allgather_kv"}),
    Subject("llama", "dp=2,cp=2", {"dp": "zero3", "cp": "ulysses"}),
    Subject("bert", "dp=2,tp=2", {"dp": "zero2", "tp": "tensor"}, options={"microbatches": 2}),
    Subject("benchmarks.mutations.models:normed", "dp=2", "ddp"),
)


def checked(plan: autopar.Plan) -> str:
    """What the checker of generated programs says is wrong; "" for nothing."""
    try:
        plan.check()
    except autopar.AutoparError as error:
        return str(error).splitlines()[0][:200]
    return ""


def digests(plan: autopar.Plan) -> dict[str, str]:
    """Of what every rank runs, and of what was planned, before anything was cut, placed or written."""
    meaning, border = plan.interface.meaning, replace(plan.interface, meaning=None)
    planned = meaning and (meaning.outputs, meaning.updates, meaning.gradients)
    texts = {"text": f"{plan.source}{border}", "meaning": repr(planned)}
    return {name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}


def tried(subject: Subject, verifies: bool, known: str = "") -> dict[str, str]:
    """What was found of one subject. known: the digest of a text that is right."""
    found = {"subject": str(subject), "checker": "-", "verify": "", "text": "", "meaning": ""}
    try:
        plan = subject.plan()
        found |= {"checker": checked(plan)} | digests(plan)
        if not verifies or found["text"] == known:
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
    known = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else {}
    os.environ["AUTOPAR_CHECK"] = "0"  # else no plan is given out that the checker refuses
    caught: dict[str, bool] = dict.fromkeys(("checker", "verify"), False)
    for subject in SUBJECTS:
        found = tried(subject, not caught["verify"], known.get(str(subject), ""))
        print(json.dumps(found), flush=True)
        for net in caught:
            caught[net] |= found[net] not in ("", "-")
        if all(caught.values()):
            break
    return int(caught["verify"])


if __name__ == "__main__":
    sys.exit(main())
