"""What one rank does in the tests of whole models in pipelines. Importable by name, as `launch` needs it."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.api.promote import only
from autopar.base.torch_compat.distributed import local_tensor
from autopar.cli.models import catalogue
from autopar.cost.collectives import collectives
from tests.dist.training import batches, message

STEPS, RATE = 10, 2e-3
LAYERS: dict[str, dict[str, int]] = {
    "llama": {"num_hidden_layers": 6},
    "gpt2": {"n_layer": 6},
    "t5": {"num_layers": 3, "num_decoder_layers": 3},
    "gemma2": {"num_hidden_layers": 6},
}
Case = tuple[dict[str, int], dict[str, str], int, str]
"""Sizes of the mesh's axes, strategies by axis, microbatches, dtype."""
GPT2 = {"n_layer": 4}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer states by parameter: the list of a rank's parameters is no other rank's."""


def model_and_batch(
    name: str, dtype: torch.dtype, layers: Mapping[str, int] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model, and a batch of 8 rows each of which has another number of labels; one has none."""
    overrides = layers or LAYERS[name]
    loaded = catalogue.load(name, tiny=True, device="cpu", seed=0, dropout=0.0, dtype=dtype, overrides=overrides)
    loaded.model.to(dtype).train()  # rotary frequencies too
    batch = dict(loaded.batch)
    labels = batch["labels"].clone()
    for row in range(labels.shape[0]):
        labels[row, : 2 * row] = -100
    labels[3] = -100
    return loaded.model, {**batch, "labels": labels}


def casts(dtype: torch.dtype) -> AbstractContextManager[object]:
    """A float64 model is to be one throughout: what its code casts to float32 would differ by float32's rounding."""
    return only(dtype) if dtype == torch.float64 else nullcontext()


def make_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW, with a schedule of its learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def train_eager(name: str, dtype: torch.dtype, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the model in one process."""
    model, batch = model_and_batch(name, dtype)
    optimizer, rates = make_optimizer(model, steps)
    losses, norms = [], []
    for each in batches(batch, steps):
        with casts(dtype):
            loss = model(**each).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def compile_case(name: str, case: Case) -> tuple[Any, dict[str, Any]]:
    """A compiled model and its batch."""
    sizes, strategy, num, dtype_name = case
    dtype = getattr(torch, dtype_name)
    model, batch = model_and_batch(name, dtype)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with casts(dtype):
        compiled = autopar.compile(model, mesh, example_inputs=batch, strategy=strategy, microbatches=num)
    assert compiled is model
    return compiled, batch


def train(compiled: Any, batch: Mapping[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Losses and norms of some steps; what this rank holds then."""
    optimizer, rates = make_optimizer(compiled, steps)
    losses, norms = [], []
    for each in batches(batch, steps):
        loss = compiled.train_step(**each).loss
        norms.append(float(compiled.clip_grad_norm_(1.0)))
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = dict(compiled.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    return {
        "losses": losses,
        "norms": norms,
        "held": {name: digest(parameter) for name, parameter in parameters.items()},
        "states": sorted(name for name, parameter in parameters.items() if optimizer.state.get(parameter)),
        "place": compiled.autopar.comm.index("pp"),
        "inner": compiled.autopar.inner.rank,
    }


def digest(x: DTensor) -> str:
    """Of the bits of this rank's piece."""
    return hashlib.sha256(local_tensor(x).detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def sent_in_a_step(compiled: Any, batch: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Bytes that this rank sends in a training step, by kind and axis; every row has labels."""
    full = {**batch, "labels": batch["labels"].clamp(min=0)}
    compiled.autopar.comm.log = events = []
    compiled.train_step(**full)
    compiled.autopar.comm.log = None
    sent: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind != "receive" and event.where != "outputs":
            sent[event.kind, event.axis] += event.bytes_sent
    return {key: value for key, value in sent.items() if value}


def said_of_a_step(compiled: Any) -> list[dict[tuple[str, str], float]] | None:
    """The same as the plan says it, by pipeline rank; on the rank that planned."""
    program = compiled.plan.program
    if program is None:
        return None
    found = []
    for rank in range(len(compiled.plan.interface.pipeline.order)):
        said: Counter[tuple[str, str]] = Counter()
        for row in collectives(program, rank):
            said[row.kind, row.axis] += row.bytes_sent  # type: ignore[assignment]
        found.append({key: value for key, value in said.items() if value})
    return found


def train_cases(name: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Train under several meshes and schedules, one after the other."""
    results = []
    for case in cases:
        compiled, batch = compile_case(name, case)
        result = train(compiled, batch)
        result["sent"], result["said"] = sent_in_a_step(compiled, batch), said_of_a_step(compiled)
        result["own"] = sorted(names_of_stages(compiled))
        result["schedule"] = compiled.plan.interface.pipeline.schedule
        results.append(result)
    return results


def names_of_stages(compiled: Any) -> set[str]:
    """The parameters of this rank's stages, as the plan says."""
    interface = compiled.plan.interface
    pipeline = interface.pipeline
    here = compiled.autopar.comm.index("pp")
    used = {
        name
        for stage, rank in zip(pipeline.stages, pipeline.rank_of, strict=True)
        for name in stage.parameters
        if rank == here
    }
    return {entry.name for entry in interface.parameters if used.intersection((entry.name, *entry.aliases))}


# -- what users do beside training


def compile_gpt2(sizes: dict[str, int], strategy: Any = "zero2", **options: Any) -> tuple[Any, dict[str, Any]]:
    """A small GPT-2, whose embedding the first and the last stage have."""
    model, batch = model_and_batch("gpt2", torch.float64, GPT2)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "plan" not in options:
        options = {"strategy": strategy, **({"microbatches": 4} if "pp" in sizes else {}), **options}
    with casts(torch.float64):
        return autopar.compile(model, mesh, example_inputs=batch, **options), batch


def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any]) -> float:
    loss = compiled.train_step(**batch).loss
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def whole(compiled: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """This rank's parameters, and its optimizer's averages, global."""
    mesh = compiled.autopar.inner.device_mesh

    def full(x: DTensor, like: DTensor) -> Tensor:
        # Anew: torch remembers operators' results with their mesh, which may be that of an earlier process group.
        shape, stride = torch.Size(like.shape), like.stride()
        again = DTensor.from_local(
            local_tensor(x).detach(), mesh, like.placements, run_check=False, shape=shape, stride=stride
        )
        return again.full_tensor().clone()

    found = {}
    for name, parameter in compiled.named_parameters():
        found[name] = full(parameter, parameter)
        if optimizer is not None:
            found[f"{name} average"] = full(optimizer.state[parameter]["exp_avg"], parameter)
    return found


def save_on_two_stages(weights: str, folder: str) -> dict[str, Any]:
    """From stored weights, two steps, a checkpoint, another step: all weights, the last loss."""
    compiled, batch = compile_gpt2({"pp": 2, "dp": 2}, {"pp": "pipeline(1f1b)", "dp": "zero2"})
    compiled.load_pretrained(weights)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    losses = [step(compiled, optimizer, batch) for _ in range(2)]
    model_state, optimizer_state = get_state_dict(compiled, optimizer, options=FLAT)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    held = whole(compiled, optimizer)
    return {"held": held, "names": list(compiled.state_dict()), "losses": [*losses, step(compiled, optimizer, batch)]}


def load_elsewhere(folder: str) -> list[dict[str, Any]]:
    """The checkpoint on more stages and on a mesh without a pipeline: what they hold, the loss of their next step."""
    found = []
    for sizes, strategy in (
        ({"pp": 4}, {"pp": "pipeline(gpipe)"}),
        ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"}),
    ):
        compiled, batch = compile_gpt2(sizes, strategy)
        compiled.init_weights(seed=5)
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
        refused = load_by_rank(compiled, optimizer) if "pp" in sizes else ""
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
        model_state, optimizer_state = get_state_dict(compiled, optimizer, options=FLAT)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            compiled, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT
        )
        held = {"held": whole(compiled, optimizer), "refused": refused}
        found.append({**held, "loss": step(compiled, optimizer, batch)})
    return found


def load_by_rank(compiled: Any, optimizer: torch.optim.Optimizer) -> str:
    """What a step says after the first rank's list of parameters was loaded on all."""
    state = get_optimizer_state_dict(compiled, optimizer)
    box = [{**state, "state": {}}]
    dist.broadcast_object_list(box, src=0)
    state["param_groups"] = box[0]["param_groups"]
    set_optimizer_state_dict(compiled, optimizer, optim_state_dict=state)
    return message(optimizer.step)


def fresh_weights() -> list[dict[str, Tensor]]:
    """init_weights with and without a pipeline."""
    found = []
    for sizes, strategy in (
        ({"pp": 2, "dp": 2}, {"pp": "pipeline(zbv)", "dp": "zero3"}),
        ({"pp": 4}, {"pp": "pipeline(1f1b)"}),
        ({"dp": 4}, "zero3"),
    ):
        compiled, _ = compile_gpt2(sizes, strategy)
        compiled.init_weights(seed=7)
        found.append(whole(compiled))
    return found


def evaluate() -> dict[str, Any]:
    """Forwards alone, batches of another shape, batches that a loader cuts, backward, and a trace of some steps."""
    compiled, batch = compile_gpt2({"pp": 2, "dp": 2}, {"pp": "pipeline(interleaved)", "dp": "zero2"})
    cut = [stage.parameters for stage in compiled.plan.interface.pipeline.stages]
    found: dict[str, Any] = {"train": float(compiled.train_step(**batch).loss.detach())}
    compiled.zero_grad()
    refused = compiled(**batch).loss
    found["refused"] = message(refused.backward)
    short = {key: value[:, :8].contiguous() for key, value in batch.items()}
    with casts(torch.float64):
        found["train short"] = float(compiled.train_step(**short).loss.detach())
        compiled.eval()
        with torch.no_grad():
            output = compiled(**batch)
            found["eval"] = float(output.loss)
            found["chosen"] = output.logits[:, -1].argmax(-1).tolist()  # of a part, which comes by itself
            found["logits"] = output.logits.full_tensor()
            found["eval short"] = float(compiled(**short).loss)
    found["cut"] = cut == [stage.parameters for stage in compiled.plan.interface.pipeline.stages]
    compiled.train()
    compiled.zero_grad()
    rows = [{key: x[i] for key, x in batch.items()} for i in range(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    found["loaded"] = [float(compiled.train_step(**each).loss.detach()) for each in compiled.shard_loader(loader)]
    alone, batch = compile_gpt2({"pp": 4}, {"pp": "pipeline(1f1b)"})  # a stage is one rank
    alone.eval()
    with casts(torch.float64), torch.no_grad():
        found["eval alone"] = float(alone(**batch).loss)
    return found


def record(path: str) -> str:
    """A trace of two steps; what a block without one says."""
    compiled, batch = compile_gpt2({"pp": 2, "dp": 2}, {"pp": "pipeline(zbv)", "dp": "zero2"})
    compiled.train_step(**batch)
    with compiled.record(path):
        compiled.train_step(**batch)
        compiled.train_step(**batch)

    def nothing() -> None:
        with compiled.record(path):
            pass

    return message(nothing)


def planned_elsewhere(folder: str) -> dict[str, float | str]:
    """Losses under a saved plan, an edited program, and schedules of the user's own; what a bad one says."""
    sizes = {"pp": 2, "dp": 2}
    compiled, batch = compile_gpt2(sizes, {"pp": "pipeline(zero_bubble)", "dp": "zero3"})
    found: dict[str, float | str] = {"fresh": float(compiled.train_step(**batch).loss.detach())}
    plan, program = Path(folder, "plan.json"), Path(folder, "mine.py")
    if dist.get_rank() == 0:
        compiled.plan.save(plan)
        source = compiled.plan.source
        assert source.count("{0: loss,") == 1
        program.write_text(source.replace("{0: loss,", "{0: loss * 2,"))
    dist.barrier()
    loaded = autopar.Plan.load(plan)
    os.environ["AUTOPAR_CHECK"] = "types"  # another loss on purpose
    for name, options in (("loaded", {}), ("edited", {"program": program})):
        compiled, batch = compile_gpt2(sizes, plan=loaded, **options)
        found[name] = float(compiled.train_step(**batch).loss.detach())
    del os.environ["AUTOPAR_CHECK"]
    # Two stages that follow each other on each rank; and a rank that wants a gradient before it has sent enough.
    rows = {
        "mine.csv": ["0F0,0F1,1F0,1F1,0F2,1F2,0F3,1F3,1B0,0B0,1B1,0B1,1B2,0B2,1B3,0B3"],
        "circle.csv": ["0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3", "1F0,1F1,1B0,1B1,1F2,1B2,1F3,1B3"],
    }
    rows["mine.csv"].append(rows["mine.csv"][0].replace("0F", "2F").replace("1F", "3F"))
    rows["mine.csv"][1] = rows["mine.csv"][1].replace("0B", "2B").replace("1B", "3B")
    for name, texts in rows.items():
        path = Path(folder, name)
        if dist.get_rank() == 0:
            path.write_text("\n".join(texts) + "\n")
        dist.barrier()

        def run(path: Path = path) -> None:
            compiled, batch = compile_gpt2(sizes, {"pp": f"pipeline({path})", "dp": "zero2"})
            found[path.name] = float(compiled.train_step(**batch).loss.detach())

        error = message(run)
        found.setdefault(name, error)
    return found


def disagree() -> dict[str, Any]:
    """Ranks with other batches; then a rank that sleeps, and how long the others waited for it."""
    compiled, batch = compile_gpt2({"pp": 2, "dp": 2}, {"pp": "pipeline(1f1b)", "dp": "zero2"})
    found: dict[str, Any] = {"timeout_s": compiled.autopar.comm.timeout_s}
    other = {**batch, "input_ids": (batch["input_ids"] + dist.get_rank()) % 100}
    found["batches"] = message(lambda: compiled.train_step(**other))
    compiled.train_step(**batch)
    dist.barrier()
    compiled.autopar.comm.timeout_s = compiled.autopar.inner.timeout_s = 2.0
    begun = time.monotonic()
    compiled.autopar.agreement.begin = lambda *args: None  # which would tell first
    if dist.get_rank() == 2:
        time.sleep(6)
    else:
        found["sleeps"] = message(lambda: compiled.train_step(**batch))
    return found | {"waited_s": time.monotonic() - begun}


def die(folder: str) -> None:
    """Rank 3 ends in the middle of a step; what the others say goes into files."""
    compiled, batch = compile_gpt2({"pp": 2, "dp": 2}, {"pp": "pipeline(1f1b)", "dp": "zero2"})
    compiled.train_step(**batch)
    compiled.autopar.comm.timeout_s = compiled.autopar.inner.timeout_s = 4.0
    rank = dist.get_rank()
    if rank == 3:
        compiled.autopar.comm.send = lambda *args: os._exit(3)
    Path(folder, str(rank)).write_text(message(lambda: compiled.train_step(**batch)))
