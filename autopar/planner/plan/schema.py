"""The types of all that a plan's file holds: `typed.check(PlanFile, …)` is the first thing that is done with one.

Shardings stand as text (`dp=S(0), tp=R`), actions of schedules too, rows of them joined by commas.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from autopar.base.typed import MaybeInfinite
from autopar.cost.collectives import Collective
from autopar.cost.estimate import Memory
from autopar.ir.placement import Overlap
from autopar.ir.program import AttentionSite, Mode
from autopar.ir.stages import Considered
from autopar.machine.curves import MatmulCurve
from autopar.machine.hardware import Link
from autopar.pipeline import PassTime
from autopar.planner.plan.drawn import CallView, RegionView
from autopar.planner.plan.record import ModelSpec, RegionSummary
from autopar.strategies.context import Spread
from autopar.strategies.pipelining.spec import PipelineSpec
from autopar.strategies.pipelining.summary import StageSummary

Points = list[tuple[float, float]]


class AttentionRow(TypedDict):
    """`AttentionCurve`."""

    causal: list[tuple[int, Points]]
    full: list[tuple[int, Points]]
    half_rows: float


class HardwareRow(TypedDict):
    """`Hardware`, of a profile that a name alone does not find."""

    name: str
    description: str
    peak_flops: dict[str, float]
    efficiency: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_overhead_s: float
    collective_launch_s: float
    devices_per_node: int
    node: Link
    network: Link
    sources: dict[str, str]
    device: NotRequired[str]
    network_cards: NotRequired[int]
    matmul: dict[str, MatmulCurve]
    attention: dict[str, AttentionRow]
    rates: NotRequired[dict[str, float]]
    plain_attention_s: NotRequired[dict[str, float]]
    memory_points: Points
    memory_share: NotRequired[dict[str, float]]
    cache_bandwidth_bytes_per_s: NotRequired[float | None]
    decoded_per_s: NotRequired[float | None]
    optimizer_passes: NotRequired[float]
    optimizer_s_per_byte: NotRequired[float | None]
    optimizer_s_per_tensor: NotRequired[float]
    view_s: NotRequired[float]
    collective_busy: NotRequired[float]
    fused_kernels: NotRequired[list[str]]
    compiled: NotRequired[bool]
    sustained: NotRequired[float]
    power_w: NotRequired[float | None]
    power_limit_w: NotRequired[float | None]
    overlap_slowdown: NotRequired[float]
    expert_imbalance: NotRequired[float]
    graph_kernel_s: NotRequired[float | None]
    host_kernel_s: NotRequired[float]
    host_collective_s: NotRequired[float]
    graphs: NotRequired[bool]
    engine: NotRequired[bool]
    whole_prompts: NotRequired[bool]
    engine_step_s: NotRequired[float]
    engine_row_s: NotRequired[float]
    head_by_head: NotRequired[bool]
    attention_rows: NotRequired[float]


class TensorRow(TypedDict):
    """`TensorInterface`."""

    name: str
    shape: list[int]
    dtype: str
    sharding: str
    differentiable: bool
    aliases: list[str]
    batch_dim: int | None
    combine: str
    block: list[int] | None
    gradient: str | None
    depends: NotRequired[bool]
    reached_by: NotRequired[list[int] | None]
    summed_over: NotRequired[str]


class StageRow(TypedDict):
    """`StageInterface`."""

    receives: list[TensorRow]
    sends: list[TensorRow]
    outputs: list[int]
    updates: list[str]
    parameters: list[str]
    buffers: list[str]
    wanted: NotRequired[list[str]]


class PipelineRow(TypedDict):
    """`PipelineInterface`."""

    axis: str
    axes: list[str]
    sizes: list[int]
    schedule: str
    order: list[str]
    rank_of: list[int]
    stages: list[StageRow]
    keeps_outputs: bool


class MeaningRow(TypedDict):
    """`Meaning`."""

    outputs: list[str]
    updates: list[str]
    gradients: dict[str, str]
    steps: str
    scheme: str
    shapes: NotRequired[list[list[int]] | None]
    roots: NotRequired[list[int] | None]
    before: NotRequired[dict[str, str]]


class ExpertsRow(TypedDict):
    """`ExpertsInterface`."""

    where: str
    axis: str
    parameters: list[str]
    token_axes: list[str]


class InterfaceRow(TypedDict):
    """`ProgramInterface`."""

    sizes: list[int]
    uses_dropout: bool
    microbatches: int
    parameters: list[TensorRow]
    buffers: list[TensorRow]
    inputs: list[TensorRow]
    outputs: list[TensorRow]
    updates: list[TensorRow]
    pipeline: PipelineRow | None
    by_value: NotRequired[list[str]]
    granted: NotRequired[list[str]]
    meaning: NotRequired[MeaningRow | None]
    experts: NotRequired[list[ExpertsRow]]
    beside: NotRequired[str]
    branches: NotRequired[list[tuple[bool, str]]]
    told: NotRequired[list[str]]
    carried: NotRequired[list[tuple[str, str, list[str | int], bool, str]]]


class CostRow(TypedDict):
    """`Cost` without its memory."""

    compute_s: float
    communication_s: float
    waiting_s: NotRequired[float]
    hidden_s: NotRequired[float]
    optimizer_s: NotRequired[float]
    host_s: NotRequired[float]


class SolvedRow(TypedDict):
    """`Solved`. Where nothing is proven, the gap has no end."""

    nodes: int
    choices: int
    edges: int
    objective_s: float
    bound_s: MaybeInfinite
    gap: MaybeInfinite
    memory_price_s_per_byte: float
    overlap_price: NotRequired[float]
    hides_exchanges: NotRequired[bool]


class StageDecision(TypedDict):
    """`Stage`."""

    calls: list[int]
    again: list[int]
    receives: list[tuple[int, int]]
    sends: list[tuple[int, int]]


class PipelineDecision(TypedDict):
    """`Pipeline`."""

    axis: str
    keeps_outputs: bool
    schedule: str
    microbatches: int
    rank_of: list[int]
    order: list[str]
    stages: list[StageDecision]


ChoiceKind = Literal["none", "factor", "linear", "ring", "exchange"]
ChoiceRow = (
    tuple[ChoiceKind, str | None, int, int | None] | tuple[ChoiceKind, str | None, int, int | None, Literal[True]]
)


class DecisionsRow(TypedDict):
    """`Decisions`."""

    operators: dict[str, dict[str, list[ChoiceRow]]]
    relays: dict[str, dict[str, str]]
    parameters: dict[str, tuple[str, str, str, str]]
    overlap: Overlap | None
    pipeline: NotRequired[PipelineDecision | None]
    inputs: dict[str, str]
    values: list[tuple[int, int, str]]
    gradients: list[tuple[int, int, str]]


class SummaryRow(TypedDict):
    """`PipelineSummary`."""

    axis: str
    schedule: str
    microbatches: int
    rank_of: list[int]
    order: list[str]
    stages: list[StageSummary]
    link: Link
    considered: list[Considered]


class SpansRow(TypedDict):
    """Spans as `packed` writes them."""

    texts: list[str]
    rows: str


class CurveRow(TypedDict):
    """`MemoryCurve`."""

    rank: int
    times_s: str
    series: dict[str, str]


class ViewsRow(TypedDict):
    """`Views`."""

    regions: list[RegionView]
    calls: list[CallView]
    outputs: list[tuple[str, str]]
    spans: SpansRow
    memory: list[CurveRow]
    forward_flops: float


class PlanFile(TypedDict):
    """`PlanRecord`."""

    title: str
    mesh: list[tuple[str, int]]
    hardware: str | HardwareRow
    strategies: list[str]
    interface: InterfaceRow
    source: str
    source_is_edited: bool
    cost: CostRow
    memory: Memory
    collectives: list[Collective]
    regions: list[RegionSummary]
    solved: SolvedRow
    decisions: DecisionsRow
    output_spec: str
    output_leaves: list[int | str | None]
    times: list[PassTime]
    pins: list[tuple[str, dict[str, str]]]
    memory_limit_bytes: float | None
    notes: list[str]
    precision: str | None
    training: bool
    rematerialize: Mode
    asked: PipelineSpec | None
    pipeline: SummaryRow | None
    attention: NotRequired[list[AttentionSite]]
    context: NotRequired[list[tuple[str, str, str]]]
    spread: NotRequired[Spread | None]
    model_spec: NotRequired[ModelSpec | None]
    taken: NotRequired[list[int]]
    views: NotRequired[ViewsRow]
