"""Work for test_porting: the rows of docs/porting.md, run as scripts."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist import training

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
TITLES = ("As it is", "With other words", "Told, with a remedy")
EXTRAS = ("import Trainer", "from accelerate", "from peft")
HAS_EXTRAS = all(importlib.util.find_spec(name) for name in ("accelerate", "peft"))
"""Rows that begin so want packages that autopar does without."""
Row = tuple[str, ...]


def tables() -> list[list[Row]]:
    """Per table of the page its rows, cells without their backticks."""
    found = []
    for title in TITLES:
        _, text = PAGE.read_text().split(f"## {title}\n", 1)
        lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| ")][2:]
        cells = [re.split(r" \| ", line.removeprefix("| ").removesuffix(" |") + " ") for line in lines]
        rows = [tuple(_code(cell) for cell in row) for row in cells]
        found.append([row for row in rows if HAS_EXTRAS or not any(name in row[0] for name in EXTRAS)])
    return found


def _code(cell: str) -> str:
    text = cell.strip()
    return text[1:-1] if text.startswith("`") and text.endswith("`") else text


def script(code: str) -> str:
    """A row's statements, one a line."""
    return code if re.match(r"(with|for) ", code) else code.replace("; ", "\n")


def names(model: Any, plain: Any, batch: dict[str, Any], folder: str, mesh: Any) -> dict[str, Any]:
    return {
        "F": F, "torch": torch, "copy": copy, "os": os, "autopar": autopar, "mesh": mesh, "folder": folder,
        "rank": dist.get_rank() if dist.is_initialized() else 0, "model": model, "plain": plain, "batch": batch,
        "rows": [{name: x[row] for name, x in batch.items()} for row in range(4)] * 4,
        "ids": batch["input_ids"], "labels": batch["labels"], "V": model.config.vocab_size,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
    }  # fmt: skip


def outcomes(names: dict[str, Any], rows: list[str]) -> list[tuple[float | None, float, float]]:
    """After each row, from the state before it: `value` or the loss, the model's loss, and the sum of all gradients."""
    model, batch = names["model"], names["batch"]
    start = {name: x.cpu().clone() for name, x in model.state_dict().items()}
    found = []
    for code in rows:
        model.load_state_dict(start)
        model.zero_grad()
        names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # One step, so that optimizers have states and gradients something to add to.
        model(**batch).loss.backward()
        names["optimizer"].step()
        model.zero_grad()
        names.pop("value", None)
        names.pop("loss", None)
        exec(script(code), names)
        value = names.get("value", names.get("loss"))
        value = None if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)
        gradients = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
        with torch.no_grad():
            found.append((value, float(model(**batch).loss), gradients))
    return found


def on_ranks(folder: str) -> tuple[list[Any], list[str]]:
    """What comes of the first two tables, and what the third says."""
    rank, num = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=num, LOCAL_WORLD_SIZE=num)  # as torchrun does
    own, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    plain = copy.deepcopy(own)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = autopar.compile(own, mesh, strategy="zero3", example_inputs=batch)
    known = names(model, plain, batch, folder, mesh)
    first, second, third = tables()
    found = outcomes(known, [row[0] for row in first] + [row[1] for row in second])
    model(**batch).loss.backward()
    texts = []
    for row in third:
        with contextlib.suppress(RuntimeError):
            texts.append(training.message(lambda row=row: exec(script(row[0]), known)))
    return found, texts


def in_one_process(folder: str) -> list[Any]:
    own, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    own.config.use_cache = False
    first, second, _ = tables()
    known = names(own, copy.deepcopy(own), batch, folder, None)
    return outcomes(known, [row[0] for row in (*first, *second)])
