from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar.base.errors import AutoparError
from autopar.runtime.checks import check_same_weights
from autopar.runtime.module import take_over
from benchmarks.training.count import CollectiveCounter
from tests.dist.launch import ChildError, launch
from tests.dist.runtime.work import compiled_mlp, full, make_mesh, mlp_executable, train_compiled, train_eager
from tests.dist.training import message
from tests.unit.runtime.programs import PLANS, Mlp, make_batch, make_mlp

pytestmark = pytest.mark.dist

RUNS = [
    ("ddp", 2, "adamw foreach"),
    ("zero3", 2, "adamw"),
    ("tensor", 2, "sgd foreach"),
    ("ddp+tensor", 4, "sgd"),
    ("zero3+tensor", 4, "adamw foreach"),
    ("zero3+tensor", 4, "adamw"),
]


@pytest.mark.parametrize(("plan", "num_ranks", "optimizer"), RUNS)
def test_training_equals_eager(plan: str, num_ranks: int, optimizer: str) -> None:
    """Breaks when outputs, gradients, clipping or an optimizer on (strided) DTensors differ from one process."""
    expected = train_eager(optimizer)
    for found in launch(train_compiled, num_ranks, plan, optimizer, plan == "zero3"):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-9, atol=1e-12)


def same_model() -> None:
    compiled = compiled_mlp("zero3")
    plain = make_mlp()
    assert isinstance(compiled, Mlp) and type(compiled).__name__ == "Mlp"
    assert inspect.signature(compiled.forward) == inspect.signature(plain.forward)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert all(isinstance(parameter, DTensor) for parameter in compiled.parameters())
    assert isinstance(compiled.up.weight, nn.Parameter)
    output = compiled(**make_batch())
    assert not isinstance(output["loss"], DTensor) and isinstance(output["logits"], DTensor)
    torch.testing.assert_close(full(output["logits"]), plain(**make_batch())["logits"].detach())
    with pytest.raises(AutoparError, match="Mlp is compiled already"):
        take_over(compiled, compiled.autopar.device_mesh, lambda args, kwargs: mlp_executable("zero3"))


def test_the_model_stays_the_model() -> None:
    """Breaks when class, names, signature or the kinds of outputs are not what the user had."""
    launch(same_model, 2)


def trained_beside_others(num_others: int) -> float:
    """The norm after a step, in a process group whose axes' groups have later names."""
    for _ in range(num_others):
        dist.new_group()
    compiled = compiled_mlp("zero3+tensor")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    compiled.train_step(**make_batch())
    optimizer.step()
    held = [*compiled.parameters(), *(optimizer.state[each]["exp_avg"] for each in compiled.parameters())]
    return float(torch.stack([full(each).norm() for each in held]).norm())


def test_a_process_group_that_ended_is_forgotten() -> None:
    """Breaks if a model compiled after `destroy_process_group` has parameters or states in groups of the time before
    it: meshes of one shape are equal, and DTensor remembers what it saw first.
    """
    first = launch(trained_beside_others, 4, 7)
    assert launch(trained_beside_others, 4, 0) == first


def dropout_seeds() -> list[float]:
    torch.manual_seed(dist.get_rank())
    compiled = compiled_mlp("ddp", edit=lambda text: text.replace("(loss, logits)", "(seed.double(), logits)"))
    return [float(compiled(**make_batch())["loss"].detach()) for _ in range(3)]


def test_dropout_seeds_agree_between_ranks_and_change_with_steps() -> None:
    """Breaks when replicas draw different masks, or every step the same one."""
    one, other = launch(dropout_seeds, 2)
    assert one == other and len(set(one)) == 3


def gradients_of_a_users_loss() -> None:
    plain, weights = make_mlp(), torch.arange(32, dtype=torch.float64).reshape(8, 4)
    expected = (plain(**make_batch())["logits"] * weights).pow(2).mean() + plain(**make_batch())["loss"] * 3
    expected.backward()
    compiled = compiled_mlp("zero3+tensor")
    output = compiled(**make_batch())
    logits = output["logits"]
    placed = DTensor.from_local(weights, logits.device_mesh, [TorchReplicate()] * 2, run_check=False)
    loss = (logits * placed).pow(2).mean() + DTensor.from_local(
        output["loss"] * 3, logits.device_mesh, [TorchReplicate()] * 2, run_check=False
    )
    assert float(full(loss)) == pytest.approx(float(expected))
    loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(full(compiled.get_parameter(name).grad), parameter.grad)
    # Several backward passes accumulate, as in eager.
    compiled.train_step(**make_batch())
    plain(**make_batch())["loss"].backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(full(compiled.get_parameter(name).grad), parameter.grad)
    with torch.no_grad():
        assert not compiled(**make_batch())["loss"].requires_grad
    # Activations may be used twice, if the graph is kept.
    compiled.zero_grad()
    loss = compiled(**make_batch())["loss"]
    loss.backward(retain_graph=True)
    once = {name: full(parameter.grad).clone() for name, parameter in compiled.named_parameters()}
    loss.backward()
    for name, parameter in compiled.named_parameters():
        torch.testing.assert_close(full(parameter.grad), 2 * once[name])


def test_a_loss_on_the_logits_backpropagates() -> None:
    """Breaks when DTensor outputs are cut off from autograd, or their gradients arrive in another placement."""
    launch(gradients_of_a_users_loss, 4)


def errors() -> None:
    model = make_mlp()
    old = torch.optim.AdamW(model.parameters())
    compiled = compiled_mlp("zero3", model)
    compiled.train_step(**make_batch())
    with pytest.raises(AutoparError, match=r"AdamW was made before autopar\.compile.*Make the optimizer after"):
        old.step()
    loss = compiled(**make_batch())["loss"]
    torch.optim.SGD(compiled.parameters(), lr=1.0).step()
    with pytest.raises(AutoparError, match=r"up\.weight was changed between forward and backward"):
        loss.backward()
    with pytest.raises(AutoparError, match="the mesh has 1 ranks, 2 processes were started"):
        take_over(make_mlp(), FakeMesh(), lambda args, kwargs: mlp_executable("ddp"))  # type: ignore[arg-type]


class FakeMesh:
    shape = (1,)

    def size(self) -> int:
        return 1


def test_misuse_is_told() -> None:
    """Breaks when an old optimizer trains nothing, or stale weights and meshes give wrong numbers, in silence."""
    launch(errors, 2)


def different_batches() -> None:
    compiled = compiled_mlp("ddp")
    batch = make_batch()
    if dist.get_rank() == 1:
        batch["y"][0, 0] += 1
    compiled(**batch)


def different_weights() -> None:
    compiled_mlp("ddp", make_mlp(seed=dist.get_rank()))


def one_of_a_thousand(value: float) -> str:
    """What is said of a parameter of which rank 1 has one element that differs, away from all samples."""
    weight = torch.arange(1003, dtype=torch.bfloat16)[1:]
    if dist.get_rank() == 1:
        weight[778] = value
    return message(lambda: check_same_weights({"bias": torch.ones(3), "weight": weight}))


@pytest.mark.parametrize(("value", "odd"), [(0.5, None), (float("nan"), "1 of 1002"), (float("-inf"), "1 of 1002")])
def test_one_weight_that_differs_is_seen(value: float, odd: str | None) -> None:
    """Breaks if only samples of weights are compared, or nobody says that one rank's are no numbers."""
    for text in launch(one_of_a_thousand, 2, value):
        assert "weight differs from rank 0's on rank 1" in text
        assert odd is None or f"NaN or infinite: {odd} on rank 1" in text
        assert odd is not None or "NaN" not in text


def swapped_collectives() -> None:
    def edit(text: str) -> str:
        if dist.get_rank() == 1:
            return text
        return text.replace("d_hidden.t() @ x, d_hidden.sum(0)", "d_hidden.t() @ x, d_hidden.sum(0)  # mine")

    compiled_mlp("ddp", edit=edit)(**make_batch())


def branches_on_the_rank() -> None:
    def edit(text: str) -> str:
        line = '    loss = comm.all_reduce(part, "dp")\n'
        return text.replace(line, line + '    if comm.rank == 1:\n        loss = comm.all_reduce(loss, "dp", "max")\n')

    compiled_mlp("ddp", edit=edit)(**make_batch())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("work", "message"),
    [
        (different_batches, r"the values of the inputs differ on rank 1 from rank 0's \(y\)"),
        (different_weights, r"different weights: up\.weight differs from rank 0's on rank 1.*Seed every rank the same"),
        (swapped_collectives, r"ranks 0 and 1 run different generated programs"),
        (
            branches_on_the_rank,
            r"cannot run its part: the program decides by the number of its rank \(line \d+, mlp forward: if",
        ),
    ],
)
def test_ranks_that_disagree_stop_before_the_first_step(work: Any, message: str) -> None:
    """Breaks when ranks with other data, weights, text or order go on to hang or to wrong numbers."""
    with pytest.raises(ChildError, match=message):
        launch(work, 2, timeout_s=30)


def log_and_reality(plan: str) -> tuple[dict[str, float], dict[str, float]]:
    compiled = compiled_mlp(plan)
    compiled.train_step(**make_batch())  # the first step also runs the checks
    compiled.autopar.comm.log = []
    with CollectiveCounter() as counter:
        compiled.train_step(**make_batch())
        compiled.clip_grad_norm_(1.0)
    logged: dict[str, float] = {}
    for event in compiled.autopar.comm.log:
        logged[event.kind] = logged.get(event.kind, 0) + event.bytes_sent
    return logged, counter.bytes_by_kind()


@pytest.mark.parametrize("plan", ["zero3", "zero3+tensor"])
def test_the_log_is_what_was_sent(plan: str) -> None:
    """Breaks when the communicator's log (and so the plan's table) and torch.distributed's own operators differ."""
    num_ranks = 1
    for size in PLANS[plan][0].values():
        num_ranks *= size
    for logged, counted in launch(log_and_reality, num_ranks, plan):
        assert logged == counted and logged["all_gather"] > 0


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def tied() -> tuple[bool, list[str], list[str]]:
    model = take_over(Tied(), make_mesh({"dp": 2}), lambda args, kwargs: mlp_executable("ddp"))
    names = [name for name, _ in model.named_parameters()]
    return model.first.weight is model.second.weight, names, list(model.state_dict())


def test_tied_weights_stay_tied() -> None:
    """Breaks when each name of a tied weight gets a parameter of its own."""
    for same, names, keys in launch(tied, 2):
        assert same and names == ["first.weight"] and keys == ["first.weight", "second.weight"]


def norms() -> list[tuple[float, float]]:
    compiled, plain = compiled_mlp("zero3+tensor"), make_mlp()
    compiled.train_step(**make_batch())
    plain(**make_batch())["loss"].backward()
    found: list[tuple[float, float]] = []
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        expected: Tensor = nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type)
        found.append((float(compiled.clip_grad_norm_(1e9, norm_type)), float(expected)))
    return found


def test_norms_count_each_element_once() -> None:
    """Breaks when a replicated gradient is counted once per rank, or a strided one not at all."""
    for found, expected in launch(norms, 4)[0]:
        assert found == pytest.approx(expected, rel=1e-12)
