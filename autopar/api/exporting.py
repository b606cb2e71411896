"""A plan exported with its weights: a folder that an engine loads, or a file for each rank, cut as the plan says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.base import files
from autopar.base.errors import AutoparError
from autopar.base.huggingface.conversion import has_table
from autopar.base.text import format_bytes
from autopar.ir.interface import TensorInterface
from autopar.planner.plan.json import to_text
from autopar.planner.plan.record import PlanRecord
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.convert import convert
from autopar.runtime.checkpoint.folders import new_folder
from autopar.runtime.checkpoint.formats import Weight, Weights, weights_of
from autopar.runtime.checkpoint.sharded import write_sharded
from autopar.runtime.checkpoint.stored import has_codes, held_by
from autopar.strategies.request import Progress
from autopar.views import engines
from autopar.views.holds import parts_by_rank

BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of files that say how a checkpoint is read, and of its tokenizer; code and pickles stay behind."""
MOST_BESIDE_BYTES = 256 * files.MIB
INDEX_ENDS = ".index.json"
LAUNCH: Mapping[str, str] = {
    "transformers-tp-plan": "distributed_config.json", "vllm": "serve.sh", "sglang": "serve.sh",
    "tensorrt-llm": "config.yaml",
}  # fmt: skip
"""How the file is called that tells an engine what was decided."""
CODES = "_codes"
"""How names of codes end (`base/stored_weights.py`)."""
HERE = '"$(dirname "$0")"'
READS: Mapping[str, str] = {
    "transformers-tp-plan": "each rank reads the slices that it keeps",
    "vllm": "each rank reads the files and keeps its part; --load-format sharded_state wants the state of its own "
    "modules, which its save_sharded_state example writes of this folder",
    "sglang": "each rank reads the files and keeps its part; --load-format sharded_state wants the state of its own "
    "modules, which its save_sharded_state example writes of this folder",
    "tensorrt-llm": "its PyTorch backend reads such folders; the older rank0.safetensors are of engines built before",
}
_REMEDY = "Give the folder of *.safetensors that the plan's model is loaded from, or what compiled.save wrote"


@dataclass(frozen=True, slots=True)
class Asked:
    """weights: a folder or file that `compiled.load_pretrained` reads, or a saved step. folder: to be made. plan: as
    its file has it.
    """

    weights: Path
    folder: Path
    model: nn.Module | None
    plan: bytes
    progress: Progress


def export(
    record: PlanRecord,
    to: str,
    model: nn.Module | None,
    name: str,
    served: engines.Served | None,
    weights: str | Path | None,
    folder: str | Path | None,
    progress: Progress | None,
) -> engines.Exported:
    """See `Plan.export`. served: what a plan for `generate()` says beside."""
    model = record.model if model is None else model
    if (weights is None) != (folder is None) or (to == engines.OWN and weights is None):
        raise AutoparError(
            "weights are exported into a folder", values=f"to {to}, weights {weights}, folder {folder}",
            remedy="name both: export(to, weights=…, folder=…), or on the command line --weights CHECKPOINT -o FOLDER",
        )  # fmt: skip
    if weights is None or folder is None:
        return engines.export(record, to, model, name, served)
    if to not in (*engines.TARGETS, engines.OWN):
        return engines.export(record, to, model, name, served)  # says which there are
    asked = Asked(Path(weights), Path(folder), model, to_text(record).encode(), progress or _untold)
    return export_weights(record, to, served, asked)


def export_weights(record: PlanRecord, to: str, served: engines.Served | None, asked: Asked) -> engines.Exported:
    """Write the folder for an engine, or with `to` = "autopar" a file for each rank.

    Raises:
        AutoparError: what the engine cannot do; weights that are damaged, or others than the plan's; a folder that is
            there already, or cannot be written. Nothing is left of it then.
    """
    with weights_of(asked.weights) as found:
        model_type = found.model_type or _model_type(asked.model)
        if to == engines.OWN:
            return _sharded(record, found, model_type, asked)
        exported = engines.export(record, to, asked.model, str(asked.folder), served)
        notes = (*exported.notes, READS[to])
        if has_codes(found.weights) and asked.model is None:
            notes = (*notes, "codes of weights go there as they are, and were not compared with the plan: no model")
        else:
            check_readable(record, found.weights, asked.weights)
            held = held_by(found.weights, asked.weights, asked.model, model_type)
            _matched(record, held, asked.weights, asked.model)
            if others := sorted(held.keys() - _names(_tensors(record))):
                notes = (*notes, f"tensors that the plan does not have go there, too: {_some(others)}")
        beside = _beside(asked, found)
        text = exported.text
        if LAUNCH[to].endswith(".sh"):
            text = "#!/bin/sh\n" + engines.export(record, to, asked.model, engines.Raw(HERE), served).text
        beside[LAUNCH[to]] = text.encode()
    single = "single" if found.kind != "huggingface" and model_type and has_table(model_type) else None
    convert(asked.weights, asked.folder, experts=single, model_type=model_type or None, beside=beside)
    return replace(exported, notes=notes, folder=asked.folder)


def _sharded(record: PlanRecord, found: Weights, model_type: str, asked: Asked) -> engines.Exported:
    held = held_by(found.weights, asked.weights, asked.model, model_type)
    tensors = _tensors(record)
    matched = _matched(record, held, asked.weights, asked.model)
    if others := sorted(held.keys() - _names(tensors)):
        raise AutoparError(
            f"the plan's model has no {_some(others)}", where=str(asked.weights), values=f"{len(others)} such tensors",
            remedy=_REMEDY,
        )  # fmt: skip
    chosen = {
        each.name: (matched[each.name], getattr(torch, each.dtype), (each.name, *each.aliases))
        for each in tensors
        if each.name in matched
    }
    ranks = parts_by_rank(record, chosen)
    boxes = [{name: [Box(*part) for part in parts] for name, parts in own.items()} for own in ranks]
    sizes = tuple(
        sum(box.numel * chosen[name][1].itemsize for name, own in each.items() for box in own) for each in boxes
    )
    with new_folder(asked.folder) as made:
        write_sharded(made, boxes, chosen, dict(record.mesh.axes), asked.plan, asked.progress)
    notes = []
    if converted := sorted({weight.dtype for weight, dtype, _ in chosen.values() if weight.dtype != dtype}, key=str):
        kinds = ", ".join(str(each).removeprefix("torch.") for each in converted)
        notes.append(f"weights of {kinds} are stored in the plan's types")
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    each_has = least if least == most else f"{least} to {most}"
    text = f"{len(sizes)} ranks, {each_has} each: compiled.load({str(asked.folder)!r})\n"
    return engines.Exported(text, tuple(notes), asked.folder, sizes)


def check_readable(record: PlanRecord, weights: Iterable[str], path: Path) -> None:
    """Raises an AutoparError where weights of the plan are codes of `store_weights`, and the checkpoint has none."""
    codes = sorted(each.name for each in record.interface.parameters if each.name.endswith(CODES))
    if codes and not has_codes(list(weights)):
        raise AutoparError(
            "weights that store_weights made codes are not written for an engine, which knows no such codes",
            where=str(path), values=_some(codes),
            remedy="export for the engine without weights, or plan the model of a checkpoint whose weights are codes "
            "that engines read (compressed-tensors, AWQ, GPTQ, float8); to autopar goes what compiled.save wrote",
        )  # fmt: skip


def _untold(name: str, number: int, count: int) -> None:
    pass


def _tensors(record: PlanRecord) -> list[TensorInterface]:
    return [*record.interface.parameters, *record.interface.buffers]


def _names(tensors: Iterable[TensorInterface]) -> set[str]:
    return {name for each in tensors for name in (each.name, *each.aliases)}


def _matched(record: PlanRecord, held: Mapping[str, Weight], path: Path, model: nn.Module | None) -> dict[str, Weight]:
    """The weights of the plan's parameters, and of the buffers that are stored, by the plan's names.

    Raises:
        AutoparError: a parameter, or a buffer that the model saves, that is not there; another shape.
    """
    found: dict[str, Weight] = {}
    missing = []
    parameters = {each.name for each in record.interface.parameters}
    wanted = parameters | (set() if model is None else set(model.state_dict(keep_vars=True)))
    for each in _tensors(record):
        weight = next((held[name] for name in (each.name, *each.aliases) if name in held), None)
        if weight is None:
            missing += [each.name] if each.name in wanted else []
            continue
        if tuple(weight.shape) != tuple(each.shape):
            raise AutoparError(
                f"{each.name} has another shape in the checkpoint", where=str(path),
                values=f"{tuple(weight.shape)}, the plan's is {tuple(each.shape)}", remedy=_REMEDY,
            )  # fmt: skip
        found[each.name] = weight
    if missing:
        raise AutoparError(
            f"the checkpoint lacks {_some(missing)}", where=str(path),
            values=f"{len(missing)} such tensors; the plan has {len(parameters)} parameters", remedy=_REMEDY,
        )  # fmt: skip
    return found


def _beside(asked: Asked, found: Weights) -> dict[str, bytes]:
    """Files of the checkpoint that are no weights, and a configuration."""
    content: dict[str, bytes] = {}
    if found.kind == "huggingface" and asked.weights.is_dir():
        for path in sorted(asked.weights.iterdir()):
            if path.suffix in BESIDE and not path.name.endswith(INDEX_ENDS) and path.is_file():
                content[path.name] = files.read_bytes(
                    path, "checkpoint's file", most_bytes=MOST_BESIDE_BYTES, remedy=_REMEDY
                )
    config: Any = getattr(asked.model, "config", None)
    if "config.json" not in content:
        if not hasattr(config, "to_json_string"):
            raise AutoparError(
                f"{asked.weights} has no config.json, without which no engine loads it",
                remedy="put the model's beside the weights, or export where a transformers model was planned",
            )
        said = json.loads(config.to_json_string(use_diff=False))
        said["architectures"] = said.get("architectures") or [type(asked.model).__name__]
        content["config.json"] = (json.dumps(said, indent=2) + "\n").encode()
    return content


def _model_type(model: nn.Module | None) -> str:
    said = getattr(getattr(model, "config", None), "model_type", "")
    return said if isinstance(said, str) else ""


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name[:200] for name in names[:most]) + more
