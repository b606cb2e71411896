"""What the processes of the pipeline tests run (importable by name, so that they can be sent to)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface
from autopar.runtime.comm import ProcessGroupComm
from autopar.runtime.executable import Executable
from autopar.runtime.module import take_over
from tests.dist.runtime.work import full, make_mesh, make_optimizer
from tests.unit.runtime.pipelines import (
    Chain,
    chain_batch,
    chain_interface,
    chain_source,
    make_chain,
    run_chain,
    schedule_of,
)

NAMES = ("loss", "logits", "first", "number")


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    return dict(zip(("ids", "labels"), args)) | kwargs


def rebuild_output(values: Any) -> dict[str, Any]:
    return dict(zip(NAMES, values, strict=True))


def chain_executable(
    name: str,
    sizes: dict[str, int],
    num: int,
    zero: bool = False,
    edit: Callable[[str], str] = lambda text: text,
    change: Callable[[ProgramInterface], ProgramInterface] = lambda interface: interface,
) -> Executable:
    schedule, rows = schedule_of(name, sizes["pp"], num), 4 * num
    interface = change(chain_interface(schedule, rows, sizes.get("dp", 1), zero, tuple(sizes)))
    source = edit(chain_source(schedule.num_stages, rows, num, zero))
    return Executable(interface, source, "<chain>", rebuild_output, flatten_inputs)


def compiled_chain(
    name: str, sizes: dict[str, int], num: int, model: nn.Module | None = None, lazy: bool = False, **options: Any
) -> Any:
    executable = chain_executable(name, sizes, num, **options)
    model = make_chain(len(executable.interface.pipeline.stages) + 1) if model is None else model
    torch.manual_seed(3)
    interface = None if lazy else executable.interface
    return take_over(model, make_mesh(sizes), lambda args, kwargs: executable, interface)


def train_chain(name: str, sizes: dict[str, int], num: int, zero: bool, lazy: bool, steps: int = 4) -> dict[str, Any]:
    """Losses, norms and outputs of some steps, the last weights and buffers of this rank, global."""
    model = compiled_chain(name, sizes, num, zero=zero, lazy=lazy)
    found: dict[str, Any] = {"losses": [], "norms": [], "logits": [], "first": [], "numbers": []}
    optimizer = make_optimizer("adamw", model.parameters())
    for step in range(steps):
        output = model.train_step(**chain_batch(4 * num, step))
        found["norms"].append(float(model.clip_grad_norm_(0.1)))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(output["loss"]))
        found["numbers"].append(int(output["number"]))
        for key in ("logits", "first"):
            found[key].append(None if output[key] is None else full(output[key]))
    found["weights"] = {key: full(value) for key, value in model.named_parameters()}
    found["state"] = list(model.state_dict())
    found["seen"] = float(model.seen)
    return found


def step_seeds() -> Iterator[int]:
    """What each step of `compiled_chain` draws from: the next number of torch's generator, which was seeded by 3."""
    generator = torch.Generator().manual_seed(3)
    while True:
        yield int(torch.empty((), dtype=torch.int64).random_(2**62, generator=generator))


def train_eager(num_layers: int, num: int, groups: int, steps: int = 4) -> dict[str, Any]:
    model: Chain = make_chain(num_layers)
    found: dict[str, Any] = {"losses": [], "norms": [], "logits": [], "first": [], "numbers": []}
    optimizer = make_optimizer("adamw", model.parameters())
    for step, seed in zip(range(steps), step_seeds(), strict=False):
        output = run_chain(model, chain_batch(4 * num, step), num, groups, seed=seed)
        output["loss"].backward()
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(output["loss"].detach()))
        found["numbers"].append(int(output["number"]))
        for key in ("logits", "first"):
            found[key].append(output[key].detach())
    found["weights"] = {key: value.detach() for key, value in model.named_parameters()}
    found["seen"] = float(model.seen)
    return found


def with_order(interface: ProgramInterface, order: tuple[tuple[str, ...], ...]) -> ProgramInterface:
    assert interface.pipeline is not None
    return replace(interface, pipeline=replace(interface.pipeline, order=order))


def moved(order: tuple[tuple[str, ...], ...], rank: int, action: str, after: str) -> tuple[tuple[str, ...], ...]:
    """The order with one action of a rank put behind another."""
    row = [each for each in order[rank] if each != action]
    row.insert(row.index(after) + 1, action)
    return tuple(tuple(row) if i == rank else each for i, each in enumerate(order))


def train_in_a_circle() -> None:
    """Rank 0 sends its last activations only after gradients have come back, which rank 1 makes after all forwards."""

    def change(interface: ProgramInterface) -> ProgramInterface:
        return with_order(interface, moved(interface.pipeline.order, 0, "0SEND_F1", "0B0"))

    model = compiled_chain("gpipe", {"pp": 2}, 2, change=change)
    model.autopar.comm.timeout_s = 1.5
    model.train_step(**chain_batch(8))


def train_with_one_rank_gone() -> None:
    model = compiled_chain("1f1b", {"pp": 2}, 4)
    model.train_step(**chain_batch(16))
    model.autopar.comm.timeout_s = 1.5
    if dist.get_rank() == 0:
        model.train_step(**chain_batch(16))


def train_in_other_orders() -> None:
    """Rank 1 receives microbatch 1 before 0, rank 0 sends 0 first."""

    def change(interface: ProgramInterface) -> ProgramInterface:
        order = moved(interface.pipeline.order, 1, "1F0", "1RECV_F1")
        return with_order(interface, moved(order, 1, "1RECV_F0", "1RECV_F1"))

    compiled_chain("gpipe", {"pp": 2}, 2, change=change).train_step(**chain_batch(8))


def train_other_schedules() -> None:
    def change(interface: ProgramInterface) -> ProgramInterface:
        assert interface.pipeline is not None
        order = schedule_of("1f1b", 2, 4).order
        return with_order(interface, tuple(tuple(map(str, row)) for row in order)) if dist.get_rank() else interface

    compiled_chain("gpipe", {"pp": 2}, 4, change=change).train_step(**chain_batch(16))


def train_other_programs() -> None:
    def edit(text: str) -> str:
        return text.replace("1 + 0.1 *", "1 + 0.2 *") if dist.get_rank() == 1 else text

    compiled_chain("gpipe", {"pp": 2}, 4, edit=edit).train_step(**chain_batch(16))


def train_other_batches() -> None:
    compiled_chain("gpipe", {"pp": 2}, 4).train_step(**chain_batch(16, dist.get_rank()))


def train_with_a_rank_in_the_text() -> None:
    """Ranks of one stage issue different collectives."""

    def edit(text: str) -> str:
        line = '    number = comm.all_reduce(counts.sum(), "dp")\n'
        assert line in text
        return text.replace(line, line + '    if comm.rank == 1:\n        comm.all_reduce(number, "dp", "max")\n')

    compiled_chain("gpipe", {"pp": 2, "dp": 2}, 4, edit=edit).train_step(**chain_batch(16))


def misuse() -> dict[str, Any]:
    """What is told to one who calls backward, or asks for a parameter that is elsewhere."""
    model = compiled_chain("1f1b", {"pp": 2}, 4)
    errors: dict[str, Any] = {}
    output = model(**chain_batch(16))
    try:
        output["loss"].backward()
    except AutoparError as error:
        errors["backward"] = str(error)
    try:
        output["logits"].to_local().sum().backward()
    except AutoparError as error:
        errors["logits"] = str(error)
    try:
        errors["shape"] = tuple(model.get_parameter("blocks.0.weight").shape)
    except AutoparError as error:
        errors["absent"] = str(error)
    errors["grads"] = [name for name, value in model.named_parameters() if value.grad is not None]
    return errors


def evaluate() -> dict[str, Any]:
    """Forward only, in the training plan: with and without gradients recorded, then a step that changes no more."""
    model = compiled_chain("zbv", {"pp": 2, "dp": 2}, 4, zero=True)
    with torch.no_grad():
        output = model(**chain_batch(16, 0))
    again = model(**chain_batch(16, 1))
    assert again["loss"].requires_grad and not output["loss"].requires_grad
    found = {key: None if value is None else full(value) for key, value in output.items()}
    return found | {"again": float(again["loss"].detach()), "seen": float(model.seen)}


def eager_evaluations() -> dict[str, Any]:
    model, seeds = make_chain(5), step_seeds()
    first = run_chain(model, chain_batch(16, 0), 4, 2, seed=next(seeds))
    second = run_chain(model, chain_batch(16, 1), 4, 2, seed=next(seeds))
    return {key: value.detach() for key, value in first.items()} | {
        "again": float(second["loss"].detach()),
        "seen": float(model.seen),
    }


def train_out_of_order() -> None:
    """Rank 1 computes before it receives."""

    def change(interface: ProgramInterface) -> ProgramInterface:
        return with_order(interface, moved(interface.pipeline.order, 1, "1RECV_F0", "1F0"))

    compiled_chain("gpipe", {"pp": 2}, 2, change=change).train_step(**chain_batch(8))


def save(folder: str, weights: str) -> dict[str, Any]:
    """Fresh weights, one step, then a checkpoint of model and optimizer; what this rank holds."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = compiled_chain("1f1b", {"pp": 2, "dp": 2}, 4, _frozen(5), zero=True)
    model.load_pretrained(weights)
    optimizer = make_optimizer("adamw", model.parameters())
    model.train_step(**chain_batch(16))
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return _held(model, optimizer)


def load(folder: str) -> dict[str, Any]:
    """The checkpoint in a new process, on a model built otherwise."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = compiled_chain("1f1b", {"pp": 2, "dp": 2}, 4, _frozen(6), zero=True)
    optimizer = make_optimizer("adamw", model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model.load_state_dict(model.state_dict())
    return _held(model, optimizer)


def _frozen(seed: int) -> Chain:
    """torch's get_state_dict wants the states of all that could be trained."""
    model = make_chain(3, seed)
    model.unused.requires_grad_(False)
    return model


def _held(model: Any, optimizer: Any) -> dict[str, Any]:
    found = {name: full(value) for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            found[f"{name} average"] = full(optimizer.state[parameter]["exp_avg"])
    return found | {"seen": model.seen.clone()}


def fresh_weights(sizes: dict[str, int]) -> dict[str, Tensor]:
    """init_weights of a model on meta, of three layers; without the axis pp, without a pipeline."""
    with torch.device("meta"):
        model = Chain(3).double()
    executable = chain_executable("gpipe", {"pp": 2} | sizes, 4, zero="dp" in sizes)
    interface = executable.interface
    if "pp" not in sizes:
        interface = replace(interface, pipeline=None)
    compiled: Any = take_over(model, make_mesh(sizes), lambda args, kwargs: executable, interface)
    compiled.init_weights(7)
    return {name: full(value) for name, value in compiled.state_dict().items()}


def load_shards() -> list[float]:
    """Losses on batches that a loader cuts, and on the same ones whole."""
    rows = [{key: x[i] for key, x in chain_batch(32).items()} for i in range(32)]
    losses = []
    for sharded in (True, False):
        model = compiled_chain("1f1b", {"pp": 2, "dp": 2}, 4)
        loader = torch.utils.data.DataLoader(rows, batch_size=16)  # type: ignore[arg-type]
        for batch in model.shard_loader(loader) if sharded else loader:
            losses.append(float(model.train_step(**batch)["loss"]))
    return losses


def nothing_to_train() -> tuple[int, list[str], float, float]:
    """A rank whose stages have no parameters takes part all the same."""

    def change(interface: ProgramInterface) -> ProgramInterface:
        """The middle stage runs no block."""
        pipeline = interface.pipeline
        first, middle, last = pipeline.stages
        stages = (first, replace(middle, parameters=()), replace(last, parameters=(*last.parameters, "unused")))
        parameters = tuple(entry for entry in interface.parameters if not entry.name.startswith("blocks.2"))
        return replace(interface, parameters=parameters, pipeline=replace(pipeline, stages=stages))

    def edit(text: str) -> str:
        return text.replace('("middle", {"blocks": range(2, 3)})', '("middle", {"blocks": range(2, 2)})')

    chain = make_chain(4)
    chain.blocks[2] = nn.Identity()
    model = compiled_chain("1f1b", {"pp": 3}, 3, chain, change=change, edit=edit)
    optimizer = make_optimizer("adamw", model.parameters())
    losses = []
    for _ in range(2):
        losses.append(float(model.train_step(**chain_batch(12))["loss"]))
        model.clip_grad_norm_(1.0)
        optimizer.step()
    return len(list(model.parameters())), [name for name, _ in model.named_parameters()], *losses


def recorded() -> list[tuple[int, str, float, float]]:
    model = compiled_chain("1f1b", {"pp": 2}, 4)
    model.train_step(**chain_batch(16))
    model.autopar.record = []
    model.train_step(**chain_batch(16))
    return [(each.rank, each.action, each.start_s, each.end_s) for each in model.autopar.record]


def views() -> tuple[list[float], list[int], list[Any]]:
    """A view that leaves out the middle axis; masks and scalars to the next stage, and back."""
    comm = ProcessGroupComm(make_mesh({"dp": 2, "pp": 2, "tp": 1}))
    inner = comm.within(("dp", "tp", "cp"))
    assert isinstance(inner, ProcessGroupComm) and inner.device_mesh.mesh_dim_names == ("dp", "tp", "cp")
    total = inner.all_reduce(torch.tensor([float(comm.rank)]), "dp")
    other = 1 - comm.index("pp")
    mask, none = torch.tensor([True, False, comm.rank == 3]), torch.empty(0, 3)
    sends = [(other, x, str(n)) for n, x in enumerate((mask, none, torch.tensor(7 + comm.rank)))]
    wanted = [((3,), torch.bool), ((0, 3), torch.float32), ((), torch.int64)]
    receives = [(other, shape, dtype, str(n)) for n, (shape, dtype) in enumerate(wanted)]
    found = comm.exchange("pp", sends, receives).wait()
    assert found[1].shape == (0, 3)
    return total.tolist(), [inner.rank, inner.size("cp")], [found[0].tolist(), int(found[2])]
