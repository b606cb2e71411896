"""Prove plans of tiny mixtures of experts, whatever their routers do; a dated page under benchmarks/results.

    python benchmarks/proofs/mixtures.py [--models mixtral,jamba] [--strategies expert] [--json FILE] [--write]

A cell is a plan of a model under a strategy for four ranks, and three proofs of it: outputs and every gradient in
float64 beside the eager model, with routing that is balanced, that sends every token to one expert, and that leaves
half of the experts without any. Which it is, the routers' weights are made to say: the least squares that give the
scores that are wanted of the layer's own inputs, one layer after the other.
"""

from __future__ import annotations

import os
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from benchmarks import pages

STRATEGIES: Mapping[str, tuple[str, Any]] = {
    "zero3": ("dp=4", "zero3"),
    "expert": ("dp=2,ep=2", {"dp": "zero3", "ep": "expert"}),
    "folded": ("dp=4", {"dp": "expert"}),
    "tensor×expert": ("dp=2,tp=2", {"dp": "expert", "tp": "tensor"}),
    "pp×expert": ("pp=2,dp=2", {"pp": "pipeline(1f1b)", "dp": "expert"}),
    "auto": ("a=4", "auto"),
}
"""Mesh and strategy of each column."""
ROUTINGS = ("balanced", "hot", "empty")
ROWS, LENGTH = 8, 3
BOUND = 1e-9
_SCORE = 4.0
TABLE = Path(__file__).with_name("mixtures.toml")


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a model under a strategy. found: by routing, `ok`, `NOT EQUAL`, or what was refused. errors: the
    largest of a proof, relative. routers: the largest of the gradients of routers. loads: the most and the fewest
    tokens of an expert of the layers that were planted, by routing. cpu_s: the plan and its proofs. whole: the plan
    says that it recognizes no experts, so that each rank has all of them.
    """

    model: str
    strategy: str
    found: dict[str, str]
    errors: dict[str, float]
    routers: dict[str, float]
    loads: dict[str, tuple[int, int]]
    cpu_s: float
    whole: bool = False


def made(entry: Mapping[str, Any], common: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with random weights, so large that experts and routers matter, and its batch."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{entry['class']}Config")(**{**common, **entry["config"]})
    model: nn.Module = getattr(transformers, entry.get("model", f"{entry['class']}ForCausalLM"))(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if vars(module).get("dtype") == torch.float32:  # what a router casts to
            module.dtype = torch.float64  # type: ignore[assignment]
    ids = torch.randint(3, 64, (ROWS, LENGTH))
    masks = {name: torch.ones_like(ids) for name in entry.get("masks", ())}
    return model.double().train(not entry.get("evaluated", False)), {"input_ids": ids, "labels": ids, **masks}


def scores(routing: str, token: Tensor, experts: int) -> Tensor:
    """The scores that are wanted, [tokens, experts]: each token prefers two experts that lie apart, and the others in
    an order of its own, so that rounding chooses none.
    """
    first, second = token % experts, (token + experts // 2) % experts
    if routing == "hot":
        first = torch.full_like(token, 1)
    if routing == "empty":
        half = torch.tensor([e for e in range(experts) if e % 4 < 2])
        first, second = half[token % len(half)], half[(token + 2) % len(half)]
    found = (token[:, None] + torch.arange(experts)).remainder(experts) * (_SCORE / 16 / experts)
    found, row = found.to(torch.float64), torch.arange(len(token))
    found[row, second] = _SCORE / 2
    found[row, first] = _SCORE
    return found


def plant(model: nn.Module, batch: Mapping[str, Any], router: str, routing: str) -> tuple[int, int]:
    """Have the weights of every router say this routing of this batch. The most and the fewest first choices that an
    expert gets then.
    """
    found = [module for name, module in model.named_modules() if name.endswith(router)]
    assert found, router
    most, fewest = 0, ROWS * LENGTH

    def fit(module: Any, given: Any) -> None:
        nonlocal most, fewest
        x = given[0].detach().reshape(-1, given[0].shape[-1])
        # Tokens that are equal get equal scores: of others the means would be, and rounding would choose between them.
        token = (torch.cdist(x, x) < 1e-9 * x.norm(dim=1)).to(torch.int64).argmax(1)
        wanted = scores(routing, token, len(module.weight))
        bias = getattr(module, "bias", None)
        with torch.no_grad():
            module.weight.copy_(torch.linalg.lstsq(x, wanted - (0.0 if bias is None else bias)).solution.t())
            first = (x @ module.weight.t() + (0.0 if bias is None else bias)).argmax(1)
        loads = first.bincount(minlength=len(module.weight))
        most, fewest = max(most, int(loads.max())), min(fewest, int(loads.min()))

    hooks = [module.register_forward_pre_hook(fit) for module in found]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return most, fewest


def planting(row: Row, router: str, routing: str) -> Callable[[nn.Module, Mapping[str, Any]], None]:
    """What gives the copy that is proven its routers, and notes their loads."""

    def prepare(model: nn.Module, batch: Mapping[str, Any]) -> None:
        row.loads[routing] = plant(model, batch, router, routing)

    return prepare


def cell(name: str, entry: Mapping[str, Any], common: Mapping[str, Any], strategy: str) -> Row:
    """Plan once, and prove with each routing: a plan does not depend on weights."""
    start, (mesh, asked), whole = time.process_time(), STRATEGIES[strategy], False
    row = Row(name, strategy, {}, {}, {}, {}, 0.0)
    model, batch = made(entry, common)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = autopar.plan(
                model, autopar.Mesh.parse(mesh, hardware="cpu"), strategy=asked, example_inputs=dict(batch)
            )
            whole = any("no experts that are recognized" in note for note in plan.notes)
            for routing in ROUTINGS:
                proof = plan.verify(rtol=BOUND, prepare=planting(row, entry["router"], routing))
                of_routers = [each.error for each in proof.comparisons if entry["router"] in each.name]
                row.found[routing] = "ok" if proof.ok else "NOT EQUAL"
                row.errors[routing] = max(each.error for each in proof.comparisons)
                row.routers[routing] = max(of_routers, default=float("nan"))
    except AutoparError as error:
        row.found.setdefault("balanced", f"refused: {str(error).splitlines()[0][:200]}")
    return Row(name, strategy, row.found, row.errors, row.routers, row.loads, time.process_time() - start, whole)


def page(rows: Sequence[Row]) -> str:
    """The table of all cells."""
    by_cell = {(row.model, row.strategy): row for row in rows}
    names, notes = list(dict.fromkeys(row.model for row in rows)), list[str]()

    def text(row: Row | None) -> str:
        if row is None:
            return ""
        if all(each == "ok" for each in row.found.values()) and len(row.found) == len(ROUTINGS):
            return f"{max(row.errors.values()):.0e} ({max(row.routers.values()):.0e}){' *' * row.whole}"
        notes.append(f"{row.model}, {row.strategy}: " + "; ".join(f"{k}: {v}" for k, v in row.found.items()))
        return f"[{len(notes)}]"

    body = pages.table(
        ("model", *STRATEGIES), [(name, *[text(by_cell.get((name, each))) for each in STRATEGIES]) for name in names]
    )
    found = [each for row in rows for each in row.found.values()]
    seconds = sorted(row.cpu_s for row in rows)
    head = (
        f"# Mixtures of experts: plans proven whatever the routers do\n\n{pages.machine()}. {found.count('ok')} of "
        f"{len(rows) * len(ROUTINGS)} proofs of {len(names)} models are right to {BOUND:.0e}, "
        f"{found.count('NOT EQUAL')} are wrong. A cell is three proofs, with routing that is balanced, that sends "
        "every token to one expert, and that leaves half of the experts empty; its number is the largest relative "
        "error of an output or a gradient in float64, in brackets that of routers; at a star no experts were "
        "recognized, so that each rank has all of them, with a warning. Four simulated ranks: "
        + "; ".join(f"{name} is {asked!r} on {mesh}" for name, (mesh, asked) in STRATEGIES.items())
        + f". A cell took {seconds[0]:.0f} to {seconds[-1]:.0f} CPU-s, median {seconds[len(seconds) // 2]:.0f}.\n\n"
    )
    return head + body + "\n" + pages.below(notes)


def main() -> int:
    options = pages.of_cells(__doc__, STRATEGIES).parse_args()
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in pages.kept(options.json)]
    for name in options.models.split(",") if options.models else table["model"]:
        for strategy in options.strategies.split(","):
            if any(row.model == name and row.strategy == strategy for row in rows):
                continue
            rows.append(cell(name, table["model"][name], table["common"], strategy))
            print(rows[-1], flush=True)
            pages.keep(options.json, rows[-1])
    print(page(rows))
    if options.write:
        print(pages.write("mixtures", page(rows)))
    return int(any("NOT EQUAL" in row.found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
