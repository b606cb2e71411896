"""The proof: generated programs compute what the eager models compute, for models × strategies × meshes.

The whole matrix is run by benchmarks/proofs/models.py; here is a slice that meets every model, strategy and mesh.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.cli.models import catalogue
from autopar.ir.sharding import REPLICATE, Partial, Shard
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.place import read_solution
from autopar.passes.placement.problem import build_problem
from autopar.solver.problem import AssignmentProblem
from autopar.solver.solve import solve
from autopar.strategies.names import pin, resolve
from tests.unit.traced import PRODUCT, annotated, finish, lower, trace, trace_model

pytestmark = pytest.mark.slow

SLICE = [
    ("llama", "dp=2", "ddp"), ("llama", "tp=2", "tensor"), ("llama", "tp=4", "tensor"), ("llama", "dp=2,tp=2", "zero3"),
    ("llama", "dp=2,tp=2", "auto"), ("llama", "dp=2,tp=4", "product"), ("llama", "tp=4", "auto"),
    ("gpt2", "dp=2", "zero3"), ("gpt2", "tp=2", "auto"), ("gpt2", "tp=4", "tensor"), ("gpt2", "dp=2,tp=2", "product"),
    ("gpt2", "dp=2,tp=4", "ddp"),
    ("bert", "dp=2", "auto"), ("bert", "tp=2", "ddp"), ("bert", "tp=4", "tensor"), ("bert", "dp=2,tp=4", "product"),
    ("mlp", "dp=2,tp=2", "product"), ("mlp", "tp=4", "tensor"), ("mlp", "dp=2,tp=4", "auto"), ("mlp", "dp=2", "zero3"),
    ("cnn", "dp=2,tp=2", "product"), ("cnn", "tp=4", "tensor"), ("cnn", "dp=2,tp=4", "auto"), ("cnn", "tp=2", "zero3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh", "strategy"), SLICE)
def test_equal_to_eager(name: str, mesh: str, strategy: str) -> None:
    """Breaks if a rule, a placement, a lowering or a loop gives a wrong number anywhere: loss, logits, any gradient."""
    assert lower(name, mesh, strategy).worst() < 1e-9


@pytest.mark.parametrize(("name", "mesh", "strategy"), [
    ("bert", "dp=2,tp=2", "product"), ("gpt2", "tp=4", "tensor"),
])  # fmt: skip
def test_equal_with_dropout(name: str, mesh: str, strategy: str) -> None:
    """Breaks if shards of one tensor draw the same numbers, replicas different ones, or the backward draws again."""
    lowered = lower(name, mesh, strategy, dropout=0.3)
    without = trace(name).expected[0][0]
    assert not torch.allclose(lowered.traced.expected[0][0], without)
    assert lowered.worst() < 1e-9


def test_dropout_draws_anew_for_every_layer_and_seed() -> None:
    """Breaks if two layers, or two steps, drop the same elements."""
    lowered = lower("gpt2", "dp=2", "ddp", dropout=0.5)
    from autopar.passes.emit import interface_of
    from autopar.runtime.simulate import simulate

    args = (interface_of(lowered.program), lowered.source, lowered.traced.state, lowered.traced.inputs)
    losses = [float(simulate(*args, seed=seed, backward=False).outputs[0]) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert "seed + i" in lowered.source


def test_verify_in_float64_and_float32() -> None:
    """Breaks if `plan.verify()` fails on a right plan, or if float32 loses more than rounding."""
    loaded = catalogue.load("gpt2", tiny=True, device="cpu")
    mesh = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=PRODUCT)
    exact = plan.verify()
    assert exact.ok and exact.worst.error < 1e-9 and exact.dropout and not exact.scaled_down
    single = plan.verify(dtype=torch.float32)
    assert single.ok and single.worst.error < 1e-4


def test_verify_a_model_on_meta_on_a_scaled_mesh() -> None:
    """Breaks if a model without weights, or a mesh too large to simulate, cannot be verified."""
    loaded = catalogue.load("mlp", tiny=True, batch=(64, 1))
    plan = autopar.plan(loaded.model, Mesh({"dp": 16, "tp": 8}, hardware="h100"), example_inputs=loaded.batch)
    proof = plan.verify()
    assert proof.ok and proof.scaled_down
    assert proof.mesh == str(Mesh({"dp": 4, "tp": 4}, hardware="h100"))


@pytest.mark.parametrize(("name", "mesh"), [("llama", "dp=4"), ("gpt2", "dp=2,tp=2")])
def test_auto_under_a_tight_memory_limit(name: str, mesh: str) -> None:
    """Breaks if the limit is not kept, or what `auto` shards to keep it computes something else."""
    free = lower(name, mesh, "ddp")  # `auto` stores pieces without being asked: they are updated sooner
    limit = 0.6 * free.program.result.peak_bytes
    tight = lower(name, mesh, memory_limit_bytes=limit)
    assert tight.program.result.peak_bytes <= limit * (1 + 1e-9)
    stored = [layout.stored for layout in tight.program.placement.parameters.values()]
    assert any(isinstance(placement, Shard) for layout in stored for placement in layout)
    assert tight.worst() < 1e-9


def test_pins_are_kept_and_right() -> None:
    """Breaks if a pin is not what the plan does, or forcing an unusual layout gives wrong numbers."""
    pins = [
        pin("model.layers.*.mlp.down_proj.weight", tp=Shard(0), dp=Shard(1)),
        pin("model.embed_tokens.weight", dp=Shard(0)),
        pin("logits", tp=Shard(1)),
        pin("input_ids", dp=Shard(1)),
    ]
    lowered = lower("llama", "dp=2,tp=2", pins=pins)
    placement = lowered.program.placement
    assert placement.parameters["model.layers.1.mlp.down_proj.weight"].stored == (Shard(1), Shard(0))
    assert placement.parameters["model.embed_tokens.weight"].stored[0] == Shard(0)
    assert placement.inputs["input_ids"][0] == Shard(1)
    assert lowered.worst() < 1e-9


@pytest.mark.parametrize(("name", "mesh", "seeds"), [
    ("llama", "dp=2,tp=2", (1,)), ("gpt2", "dp=2,tp=2", (1, 2)), ("bert", "dp=2,tp=2", (1,)),
    ("mlp", "a=2,b=2,c=2", (1, 2, 3)), ("cnn", "a=2,b=2,c=2", (1,)),
])  # fmt: skip
def test_random_placements(name: str, mesh: str, seeds: tuple[int, ...]) -> None:
    """Breaks if any admitted strategy of any operator is wrong, also those that no optimum would choose."""
    dropout = 0.1 if name in ("bert", "gpt2") else 0.0
    program = annotated(name, mesh, dropout)
    assert program.mesh is not None
    strategies = resolve("auto", program.mesh)
    built = build_problem(program, strategies, (), None)
    for seed in seeds:
        solution = solve(_with_random_costs(built.problem, seed), gap=0.9, time_limit_s=20)
        placed = read_solution(program, built, solution)
        assert finish(trace(name, dropout), placed, strategies).worst() < 1e-9


class Rare(nn.Module):
    """Sequence first, masks, views of views, reductions of many kinds, writes in place; several outputs and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8)
        self.table = nn.Embedding(16, 8)

    def forward(self, input: Tensor, mask: Tensor, index: Tensor) -> dict[str, Tensor]:
        q, k, v = self.qkv(input).chunk(3, -1)  # [S, B, D]
        scores = torch.einsum("sbd,tbd->bst", q, k).masked_fill(~mask.t()[:, None, :], float("-inf"))
        y_SBD = torch.einsum("bst,tbd->sbd", torch.nan_to_num(scores.softmax(-1)), v)
        count = mask.sum()
        heads = y_SBD.view(4, 8, 2, 4).permute(1, 2, 0, 3)
        z = torch.cat([heads[..., 2:], -heads[..., :2]], -1).transpose(1, 2).reshape(8, 4, 8)
        z = self.norm(self.conv(z)).unflatten(2, (2, 4)).select(2, 1)
        z = z * 1.0
        z[:, 1:3] = 0
        z[0] += 1
        rows = functional.normalize(self.table(index), dim=-1)
        total = (self.out(y_SBD).square().sum(-1) * mask).sum() / count + z.logsumexp(1).sum() + rows.prod(-1).sum()
        total = total + y_SBD.std(0).sum() + functional.mish(rows).cumsum(0).max(1).values.sum() + 0.5 * (z > 0).sum()
        return {
            "sum": total[None].expand(3), "side": z.roll(1, 0).flip(1), "best": scores.argmax(-1),
            "bits": (z > 0).to(torch.int8).sum(0), "any": mask.any(0), "largest": y_SBD.detach().amax(),
        }  # fmt: skip


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "a=4"])
def test_random_placements_of_rare_operators(mesh: str) -> None:
    """Breaks if an integer or a mask is summed wrongly, a discovered rule is wrong, or a write in place is lost."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 8, generator=generator) > 0.4
    mask[:, 3] = False
    batch = {"input": torch.randn(4, 8, 8, generator=generator), "mask": mask, "index": torch.arange(8) * 2}
    traced = trace_model(Rare(), batch)
    program = annotate(traced.program, mesh=Mesh.parse(mesh, hardware="cpu"))
    assert program.mesh is not None
    strategies = resolve("auto", program.mesh)
    built = build_problem(program, strategies, (), None)
    for seed in range(2):
        solution = solve(_with_random_costs(built.problem, seed), gap=0.9, time_limit_s=20)
        assert finish(traced, read_solution(program, built, solution), strategies).worst() < 1e-9


def _with_random_costs(problem: AssignmentProblem, seed: int) -> AssignmentProblem:
    random = np.random.default_rng(seed)

    def drawn(costs: np.ndarray, scale: float) -> np.ndarray:
        return np.where(np.isfinite(costs), scale * random.random(costs.shape) ** 2, np.inf)

    nodes = tuple(replace(node, costs=drawn(node.costs, 1.0), usages=()) for node in problem.nodes)
    edges = tuple(edge._replace(costs=drawn(edge.costs, 0.01)) for edge in problem.edges)
    return AssignmentProblem(nodes, edges, None)


# -- batches that are easy to get wrong --------------------------------------------------------------------------------


def _one_rank_without_labels(batch: dict[str, torch.Tensor]) -> None:
    batch["labels"][:4] = -100


def _padded_rows(batch: dict[str, torch.Tensor]) -> None:
    batch["attention_mask"][2:6, 1:] = 0
    batch["attention_mask"][7] = 0


@pytest.mark.parametrize(
    ("name", "strategy"), [("llama", "ddp"), ("gpt2", "product"), ("mlp", "ddp"), ("bert", "auto")]
)
def test_labels_all_ignored_on_one_rank(name: str, strategy: str) -> None:
    """Breaks if a mean over labels is taken per rank: a rank without labels gives nan, the others a wrong weight."""
    lowered = lower(name, "dp=2,tp=2" if strategy == "product" else "dp=2", strategy, edit=_one_rank_without_labels)
    assert torch.isfinite(lowered.traced.expected[0][0])
    assert lowered.worst() < 1e-9


@pytest.mark.parametrize("strategy", ["product", "auto"])
def test_padding_and_a_fully_masked_row(strategy: str) -> None:
    """Breaks if a mask is split wrongly, or a row that attends to nothing gives nan on one side only."""
    lowered = lower("bert", "dp=2,tp=2", strategy, edit=_padded_rows)
    assert all(torch.isfinite(gradient).all() for gradient in lowered.traced.expected[1].values())
    assert lowered.worst() < 1e-9


def test_no_partial_value_leaves_a_region() -> None:
    """Breaks if terms of a sum cross between calls, where another region might read them as the whole."""
    placement = lower("llama", "dp=2,tp=2", "product").program.placement
    for layout in (*placement.values.values(), *placement.gradients.values(), *placement.inputs.values()):
        assert not any(isinstance(placed, Partial) for placed in layout)


def test_tensor_on_an_axis_that_divides_no_vocabulary() -> None:
    """Breaks if GPT-2's odd vocabulary (127 here) is an error instead of a table that stays whole."""
    placement = lower("gpt2", "tp=2", "tensor").program.placement
    assert placement.parameters["transformer.wte.weight"].stored == (REPLICATE,)
    assert placement.parameters["transformer.h.0.attn.c_attn.weight"].stored == (Shard(1, outer=3),)


@pytest.mark.parametrize(("model", "mesh"), [("llama", "tp=8"), ("gpt2", "tp=16"), ("bert", "dp=1,tp=16")])
@pytest.mark.parametrize("strategy", ["tensor", "auto"])
def test_heads_that_do_not_divide_are_planned(model: str, mesh: str, strategy: str) -> None:
    """Breaks if more ranks than KV heads, or than heads, are an error, or plan something silently wrong."""
    assert lower(model, mesh, strategy).worst() < 1e-9
