"""Blocks that the model itself looks into, or changes from outside, are traced whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.api import interpret
from autopar.passes import capture as capturing
from autopar.passes.outline import outline
from tests.unit.passes.repeated import Block, Row, Scaled, texts


class Looking(Row):
    """Asks a block for a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (2 if hasattr(block, "linear") else 3)
        return x.sum()


class Changing(Row):
    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.width = 1 + number % 2
            x = block(x)
        return x.sum()


class Penalized(Row):
    """Adds the squares of all parameters, among them those of blocks that a tracer is not shown."""

    def end(self, given: list[Tensor]) -> Tensor:
        return given[-1].sum() + sum(parameter.square().sum() for parameter in self.parameters())


class Penalizing(Row):
    def end(self, given: list[Tensor]) -> Tensor:
        linear = (module for module in self.modules() if isinstance(module, nn.Linear))
        return given[-1].sum() + sum(module.weight.square().sum() for module in linear)


class Saving(Row):
    def end(self, given: list[Tensor]) -> Tensor:
        return given[-1].sum() + sum(value.square().sum() for value in self.state_dict(keep_vars=True).values())


class Sorting(Row):
    """Asks what each block is."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (2 if type(block) is Block else 3)
        return x.sum()


class Setting(Row):
    """Fills a buffer of each block with another value."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.scale = x.mean() * (number + 1)
            x = block(x)
        return x.sum()


class Buffered(Block):
    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def act(self, x: Tensor) -> Tensor:
        return x * self.scale


class Sharing(Row):
    """One module in two places, so that the tracer hands out proxies."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.before = nn.Tanh()
        self.after = self.before

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.after(self.before(x)))


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "asked for a part": lambda: Looking([Block(i) for i in range(6)]),
    "changed": lambda: Changing([Block(i) for i in range(6)]),
    "parameters": lambda: Penalized([Block(i) for i in range(6)]),
    "modules": lambda: Penalizing([Block(i) for i in range(6)]),
    "saved": lambda: Saving([Block(i) for i in range(6)]),
    "types": lambda: Sorting([Block(i) for i in range(6)]),
    "buffers": lambda: Setting([Buffered(i) for i in range(6)]),
    "shared modules": lambda: Sharing([Scaled(i) for i in range(6)]),
}


@pytest.mark.moderate
@pytest.mark.parametrize("case", WHOLE)
def test_blocks_that_are_looked_into_are_traced_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a model that lists what is in its blocks sees only those that the tracer is shown."""
    model, batch = WHOLE[case](), {"x": torch.randn(2, 4)}
    once, whole, _ = texts(model, batch, monkeypatch)
    assert once == whole
    monkeypatch.undo()
    program = outline(capturing.capture(model, batch))
    outputs, _ = interpret.run(program, interpret.state_of(model, program), batch)
    torch.testing.assert_close(outputs[0], model(**batch))


def test_a_model_that_keeps_statistics_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if blocks are looked for where a batch norm writes its statistics: that trace is thrown away."""

    class Normed(Row):
        def __init__(self, blocks: list[nn.Module]) -> None:
            super().__init__(blocks)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    traces: list[nn.Module] = []
    export = torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda model, *rest, **how: traces.append(model) or export(model, *rest, **how)
    )
    for trains, count in ((True, 1), (False, 1)):
        traces.clear()
        capturing.capture(Normed([Block(), Block(), Block()]).train(trains), {"x": torch.randn(4, 4)})
        assert len(traces) == count
