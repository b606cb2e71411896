"""A traced program as far as `annotate`, for each mode of recomputation that is tried: made once, for all tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar import pipeline
from autopar.cost.context import computing_seconds
from autopar.cost.fusion import FUSED, OPAQUE
from autopar.cost.roofline import optimizer_time_s
from autopar.ir.program import Mode, Program
from autopar.strategies.context import Spread
from autopar.strategies.request import Request

_Key = tuple[Mode, Spread | None]


@dataclass(slots=True)
class Prepared:
    """The programs of one request and its trace, which is differentiated; `steps` are all passes.

    spread: what a program is prepared for; None: what the strategies of the request need. times: of the passes that
    have run.
    """

    request: Request
    steps: tuple[pipeline.Pass, ...]
    traced: Program
    _spread: dict[_Key, Program] = field(default_factory=dict)
    _annotated: dict[_Key, Program] = field(default_factory=dict)
    _computing: dict[Mode, float] = field(default_factory=dict)
    _least: dict[Mode, float] = field(default_factory=dict)
    times: list[pipeline.PassTime] = field(default_factory=list)

    @staticmethod
    def serves(steps: Sequence[pipeline.Pass]) -> bool:
        """Whether these passes are the usual ones from a trace to a lowered program."""
        wanted = ("rematerialize", "spread_heads", "annotate", "place", "insert_collectives")
        return pipeline.Phases.of(steps).have(*wanted)

    def starting_from(self, mode: Mode, annotated: Program) -> None:
        """Know the annotated program of a mode."""
        self._annotated[mode, None] = annotated

    def spread_for(self, mode: Mode, spread: Spread | None = None) -> Program:
        """Before `annotate`."""
        if (mode, spread) not in self._spread:
            self._spread[mode, spread] = self._run(self.phases.recompute, self.traced, mode, spread)
        return self._spread[mode, spread]

    def annotated_for(self, mode: Mode, spread: Spread | None = None) -> Program:
        """Before `place`."""
        if (mode, spread) not in self._annotated:
            program = self.spread_for(mode, spread)
            self._annotated[mode, spread] = self._run(self.phases.annotate, program, mode, spread)
        return self._annotated[mode, spread]

    def computing_s(self, mode: Mode) -> float:
        """Seconds that one rank would compute alone, but for the attention of repeated blocks."""
        if mode not in self._computing:
            self._computing[mode] = computing_seconds(self.spread_for(mode, Spread()), self.request.mesh)
        return self._computing[mode]

    def least_s(self, mode: Mode) -> float:
        """Less than any step takes that computes so much again (`least_step_s`)."""
        if mode not in self._least:
            self._least[mode] = least_step_s(self.annotated_for(mode))
        return self._least[mode]

    @property
    def phases(self) -> pipeline.Phases:
        """The passes in their phases."""
        return pipeline.Phases.of(self.steps)

    def _run(self, steps: tuple[pipeline.Pass, ...], program: Program, mode: Mode, spread: Spread | None) -> Program:
        request = replace(self.request, rematerialize=mode, spread=spread)
        found, times = pipeline.run(request, steps, program=program)
        self.times += times
        return found


def least_step_s(program: Program) -> float:
    """Seconds that any placement of an annotated program computes and updates, in one step of one rank: every operator
    split as suits it best, and nothing moved. Of regions that are compiled, what is not fused.
    """
    assert program.mesh is not None
    mesh = program.mesh
    found = 0.0
    for region in program.regions:
        times = program.num_calls(region.name) * program.microbatches
        for name, options in region.options.items():
            call, rule = region.ops[name]
            fuses = rule.op_class in FUSED and call.name.split(".")[1] not in OPAQUE
            if not (mesh.hardware.compiled and fuses):
                found += times * min(options.seconds, default=0.0)
    trained = [v for v in program.variables if v.is_parameter and v.trainable and program.training]
    elements = sum(variable.type.num_elements for variable in trained) // mesh.num_devices
    size = sum(variable.type.num_elements * variable.stored_dtype.itemsize for variable in trained) / mesh.num_devices
    return found + (optimizer_time_s(elements, size, mesh.hardware) if elements else 0.0)
