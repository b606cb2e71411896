"""joint_sums: which small sums travel together, and that they are what they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.cli.models import catalogue
from autopar.ir.sharding import PARTIAL, REPLICATE, Shard, Sharding
from autopar.ir.tensor_type import TensorType
from autopar.machine.mesh import Mesh
from autopar.passes import joint_sums
from autopar.passes.joint_sums import join_sums
from autopar.runtime.simulated_comm import SimulatedMesh

SUM = PARTIAL


def lowered(*values: tuple[tuple[int, ...], torch.dtype, Sharding, str], read_between: bool = False) -> fx.Graph:
    """Sums of placeholders (shape, dtype, sharding, axis); the first may be read before the others."""
    graph = fx.Graph()
    comm = graph.placeholder("comm")
    sums: list[fx.Node] = []
    for number, (shape, dtype, sharding, axis) in enumerate(values):
        term = graph.placeholder(f"x{number}")
        term.meta |= {"type": TensorType(shape, dtype), "sharding": sharding}
        if read_between and number == 1:
            sums.append(graph.call_function(torch.ops.aten.neg.default, (sums[0],)))
        total = graph.create_node("call_method", "all_reduce", (comm, term, axis), name=f"x{number}_sum")
        total.meta |= {"type": TensorType(shape, dtype), "sharding": (REPLICATE,) * len(sharding)}
        sums.append(total)
    graph.output(tuple(sums))
    return graph


def num_sums(graph: fx.Graph) -> int:
    join_sums(graph, (2, 2))
    graph.lint()
    return sum(node.op == "call_method" for node in graph.nodes)


ROWS = ((8,), torch.float32, (SUM, Shard(0)), "dp")
SCALAR = ((), torch.float32, (SUM, REPLICATE), "dp")


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ([SCALAR, SCALAR, SCALAR], 1),
        ([ROWS, ROWS], 1),
        ([ROWS, SCALAR], 2),
        ([SCALAR, ((), torch.int64, SCALAR[2], "dp")], 2),
        ([SCALAR, ((), torch.float32, SCALAR[2], "tp")], 2),
        ([ROWS, ((8,), torch.float32, (SUM, REPLICATE), "dp")], 2),
        ([((1 << 18,), torch.float32, (SUM, REPLICATE), "dp")] * 2, 2),
    ],
)
def test_what_is_joined(values: list[tuple[tuple[int, ...], torch.dtype, Sharding, str]], left: int) -> None:
    """Breaks if terms of other types, layouts or axes are added to one another, or large ones are copied."""
    assert num_sums(lowered(*values)) == left


def test_a_sum_that_is_read_before_the_next_is_alone() -> None:
    """Breaks if a sum waits for terms that come later than its readers."""
    assert num_sums(lowered(SCALAR, SCALAR, read_between=True)) == 2


def test_a_maximum_joins_no_sum() -> None:
    """Breaks if terms whose maximum is wanted are added, or the other way round: they are alike in all but that."""
    graph = lowered(SCALAR, SCALAR, SCALAR)
    maximum = next(node for node in graph.nodes if node.name == "x1_sum")
    maximum.kwargs = {"op": "max"}
    assert num_sums(graph) == 2
    (alone,) = (node for node in graph.nodes if node.name == "x1_sum")
    assert alone.target == "all_reduce" and alone.kwargs == {"op": "max"}


@pytest.mark.parametrize("count", [1, 2])
def test_sums_over_two_axes(count: int) -> None:
    """Breaks if a sum over a second axis, next to be read, keeps those over the first from being one message, or if one
    that is alone stays in front of what it reads.
    """
    graph = lowered(SCALAR, SCALAR)
    comm, output = next(iter(graph.nodes)), next(iter(reversed(graph.nodes)))
    seconds = []
    for first in output.args[0][:count]:
        first.meta["sharding"] = (REPLICATE, SUM)
        with graph.inserting_after(first):
            second = graph.create_node("call_method", "all_reduce", (comm, first, "tp"), name=f"{first.name}_tp")
        second.meta |= {"type": first.meta["type"], "sharding": (REPLICATE, REPLICATE)}
        seconds.append(second)
    output.args = ((*seconds, *output.args[0][count:]),)
    assert num_sums(graph) == 2
    assert [str(node.args[2]) for node in graph.nodes if node.op == "call_method"] == ["dp", "tp"]


@pytest.mark.parametrize("dim", [0, 1])
def test_joined_scatters_give_what_they_gave_apart(dim: int) -> None:
    """Breaks if what is stacked is scattered along another dim, or the results change places."""
    graph, terms = fx.Graph(), torch.arange(96.0).reshape(2, 2, 4, 6)
    comm, results = graph.placeholder("comm"), []
    for number in range(2):
        term = graph.placeholder(f"x{number}")
        term.meta |= {"type": TensorType((4, 6), torch.float32), "sharding": (SUM,)}
        result = graph.create_node("call_method", "reduce_scatter", (comm, term, "dp", dim), name=f"x{number}_part")
        result.meta |= {"type": TensorType((4, 6), torch.float32), "sharding": (Shard(dim),)}
        results.append(result)
    graph.output(tuple(results))
    join_sums(graph, (2,))
    assert sum(node.op == "call_method" for node in graph.nodes) == 1
    run = fx.GraphModule(nn.Module(), graph)
    found = SimulatedMesh(("dp",), (2,)).run(lambda comm: run(comm, *terms[comm.rank]))
    for rank in range(2):
        for number in range(2):
            assert torch.equal(found[rank][number], terms.sum(0)[number].chunk(2, dim)[rank])


def test_text_and_names() -> None:
    """Breaks if a joined sum is not known by the name it had, or the stack is said to lie otherwise than it does."""
    graph = lowered(ROWS, ROWS)
    join_sums(graph, (2, 2))
    names = [node.name for node in graph.nodes]
    assert names[-5:] == ["x0_and_x1", "all_reduce", "x0_sum", "x1_sum", "output"]
    (stack,) = (node for node in graph.nodes if node.name == "x0_and_x1")
    assert (stack.meta["type"].shape, stack.meta["sharding"]) == ((2, 8), (SUM, Shard(1)))


class Weighted(nn.Module):
    """A loss of one's own: two sums over the rows, of which both are read after both are known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        rows = self.linear(x).square().sum(-1)
        return (rows * weights).sum() / weights.sum()


@pytest.mark.moderate
def test_any_models_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if only the operators of a known loss are joined, or numbers change."""
    batch = {"x": torch.randn(8, 8), "weights": torch.rand(8)}
    mesh = Mesh({"dp": 4})
    plan = autopar.plan(Weighted(), mesh, example_inputs=batch, strategy="ddp")
    assert plan.source.count("comm.all_reduce(") == 1 and plan.verify().raise_on_failure().ok
    monkeypatch.setattr(joint_sums, "MAX_BYTES", 0)
    apart = autopar.plan(Weighted(), mesh, example_inputs=batch, strategy="ddp")
    assert apart.source.count("comm.all_reduce(") == 2
    assert apart.bytes_by_axis() == plan.bytes_by_axis()


@pytest.mark.moderate
def test_sums_that_are_large_enough_to_be_freed() -> None:
    """Breaks if a message of several results is taken for a variable that could be deleted after its last use."""
    loaded = catalogue.load("llama", tiny=True, batch=(64, 1024))
    plan = autopar.plan(loaded.model, Mesh({"tp": 2}), example_inputs=loaded.batch, strategy="tensor")
    assert "sum_exp, take_label = comm.all_reduce(torch.stack([sum_exp, take_label])" in plan.source
    compile(plan.source, "program.py", "exec")


@pytest.mark.slow
def test_a_vocabulary_parallel_loss() -> None:
    """Breaks if the loss of split rows and a split vocabulary takes more than three messages: the maximum, its sum of
    exponentials with the label's logit, and the sum of the losses with how many rows count.
    """
    loaded = catalogue.load("llama", tiny=True)
    mesh = Mesh({"dp": 2, "tp": 2})
    strategy = {"dp": "zero3", "tp": "tensor"}
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy)
    epilogue = plan.source.partition("def epilogue_forward(")[2].partition("\ndef ")[0]
    assert epilogue.count("comm.") == 4  # and one index, of where a rank's vocabulary begins
    assert plan.verify().raise_on_failure().ok
