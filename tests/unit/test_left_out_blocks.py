"""Steps that leave out blocks of a model (stochastic depth), over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.again import same_stages, unused_as_stored
from autopar.base.errors import AutoparError
from autopar.ir.stages import Stage
from autopar.runtime.holders import holders
from autopar.strategies.pipelining.spec import PipelineSpec

BATCH = {"x": torch.randn(4, 4), "y": torch.randint(0, 3, (4,))}
MESH = autopar.Mesh.parse("pp=4", hardware="cpu")


class Block(nn.Module):
    """A residual block of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.own(x))


class Dropping(nn.Module):
    """Half of the blocks are left out, others in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand(1) < 0.5:
                continue
            x = block(x)
        return nn.functional.cross_entropy(self.last(x), y)


def _drawing(*wanted: int) -> None:
    """Have torch's generator draw so that these blocks are run."""
    for seed in range(1000):
        torch.manual_seed(seed)
        if tuple(n for n in range(5) if not torch.rand(1) < 0.5) == wanted:
            torch.manual_seed(seed)
            return
    raise AssertionError(wanted)


@pytest.mark.moderate
@pytest.mark.parametrize(("first", "later"), [((0, 1, 2, 4), [(3,), ()]), ((1, 3), [(0, 1, 2, 3, 4)])], ids=str)
def test_stages_keep_their_parameters_whatever_a_step_leaves_out(
    first: tuple[int, ...], later: list[tuple[int, ...]]
) -> None:
    """Breaks if the cut follows what is left out, so that a step in mid-training is refused; if a parameter that the
    first step left out lies where its block will not run; or if a stage that has nothing to compute hands nothing on.
    """
    model, asked = Dropping(), {"pp": PipelineSpec("1f1b")}
    _drawing(*first)
    plan = autopar.plan(model, MESH, example_inputs=BATCH, strategy=asked, microbatches=2)
    held = holders(plan.interface)
    ranks = [held[f"blocks.{n}.own.weight"] for n in range(5)]
    assert ranks == sorted(ranks)
    for number, run in enumerate(later):
        _drawing(*run)
        stages = same_stages(plan, asked)
        other = autopar.plan(model, MESH, example_inputs=BATCH, strategy=stages, microbatches=2)
        assert holders(unused_as_stored(other, plan).interface) == held
        assert number or other.verify().ok
        said = [stage.runs == "nothing, and hands on" for stage in other.pipeline.stages]  # type: ignore[union-attr]
        assert said == [not stage.calls for stage in _stages(other)]


def _stages(plan: autopar.Plan) -> Sequence[Stage]:
    assert plan.program is not None and plan.program.pipeline is not None
    return plan.program.pipeline.stages


@pytest.mark.moderate
def test_a_report_of_a_forward_that_draws(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if a report plans another step's blocks for what other memory would buy, and ends in its refusal."""
    _drawing(0, 1, 2, 4)
    plan = autopar.plan(Dropping(), MESH, example_inputs=BATCH, strategy={"pp": "pipeline(1f1b)"}, microbatches=2)
    plan.report(tmp_path / "report.html")
    assert "what other memory would buy: forward draws" in caplog.text and (tmp_path / "report.html").exists()


@pytest.mark.moderate
def test_a_block_that_the_model_has_not_is_no_cut() -> None:
    """Breaks if a slip in a cut's name is taken for a block that this step leaves out."""
    _drawing(0, 1, 2, 3, 4)
    cut = PipelineSpec("1f1b", cut=("blocks.1", "blocks.2", "blocks.9"))
    with pytest.raises(AutoparError, match=r"'blocks\.9', which is no block"):
        autopar.plan(Dropping(), MESH, example_inputs=BATCH, strategy={"pp": cut}, microbatches=2)
