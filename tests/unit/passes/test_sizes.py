"""sizes: which dims of a program's values have names, and where the text says them."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autopar import pipeline
from autopar.api.promote import only
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.emission.sizes import Sizes, shaped, sizes_of
from autopar.passes.emit import emit
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import resolve
from autopar.strategies.request import Request
from tests.unit.traced import lower

B, S, H, G, D, W = 4, 6, 4, 2, 8, 20


class Attention(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.q, self.o = nn.Linear(W, H * D, bias=False), nn.Linear(H * D, W, bias=False)
        self.k, self.v = (nn.Linear(W, key_heads * D, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(B, S, H, D).transpose(1, 2)
        k, v = (each(x).view(B, S, self.key_heads, D).transpose(1, 2) for each in (self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).reshape(B, S, H * D)).square().sum()


class Flat(nn.Module):
    """No attention: only the rows have a name."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(W, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).view(B, S, 3, 4).square().sum()


@lru_cache(maxsize=8)
def lowered(model: type[nn.Module], *arguments: int, ranks: int = 2) -> tuple[Program, tuple[AxisStrategy, ...]]:
    """A small model, its rows over the ranks."""
    mesh = Mesh({"dp": ranks}, hardware="cpu")
    strategies = resolve("zero3", mesh)
    batch = {"x": torch.randn(B, S, W, dtype=torch.float64)}
    request = Request(model(*arguments).double(), batch, mesh, strategies)
    with only(torch.float64):
        program, _ = pipeline.run(request)
    return program, strategies


def test_what_attention_reads_names_the_sizes() -> None:
    """Breaks if a dim of attention's operands gets another letter, or a size that no rank has."""
    sizes = sizes_of(lower("llama", "dp=2,tp=2", "product").program)
    assert dict(sizes.values) == {"B": 4, "S": 16, "H": 4, "G": 2, "D": 8}
    assert dict(sizes.notes) == {"B": "8/dp", "S": "16", "H": "8/tp", "G": "4/tp", "D": "8"}


@pytest.mark.moderate
@pytest.mark.parametrize(("key_heads", "wanted"), [(G, {"G": G}), (H, {}), (1, {})])
def test_key_heads_have_a_letter_of_their_own(key_heads: int, wanted: dict[str, int]) -> None:
    """Breaks if fewer key heads are called heads, or all of them key heads, or one alone gets a name."""
    sizes = sizes_of(lowered(Attention, key_heads)[0])
    assert dict(sizes.values) == {"B": B // 2, "S": S, "H": H, "D": D} | wanted


@pytest.mark.moderate
def test_one_row_is_a_number() -> None:
    """Breaks if a size of one has a name, which would say less than the number."""
    assert "B" not in sizes_of(lowered(Attention, G, ranks=B)[0]).values


def texts(model: type[nn.Module], *arguments: int) -> set[str]:
    """The shapes of a program's views, as text."""
    program, _ = lowered(model, *arguments)
    sizes = sizes_of(program)
    found: set[str] = set()
    for region in program.regions:
        for phase in region.phases.values():
            found |= {", ".join(sizes.shape(region, node, given) or ["?"]) for node, given in shaped(phase)}
    return found


def test_shapes_say_the_names() -> None:
    """Breaks if a view of heads is written in numbers, or several heads side by side lose their product."""
    assert {"B, S, H, D", "B, S, H * D", "B, S, G, D", "B, S, G * D"} <= texts(Attention, G)


def test_dims_without_attention_are_numbers() -> None:
    """Breaks if a dim that is nothing but as large as another one takes its name."""
    assert {f"B, {S}, 3, 4", f"B, {S}, 12"} <= texts(Flat)
    assert not any("S" in text or "H" in text for text in texts(Flat))


def test_sizes_are_said_at_the_top() -> None:
    """Breaks if the text uses a name that it does not define, or says what a size is beside another value."""
    program, strategies = lowered(Attention, G)
    lines = emit(program, strategies=strategies).splitlines()
    assert f"B = {B // 2}  # rows of the batch: {B}/dp" in lines
    assert f"G = {G}  # key heads: {G}" in lines


@pytest.mark.parametrize(
    ("values", "size", "wanted"),
    [
        ({"H": 2, "D": 8}, 16, "H * D"),
        ({"H": 2, "D": 8}, 8, "8"),
        ({"H": 2}, 16, "16"),
        ({}, 16, "16"),
    ],
)
def test_another_size_is_a_number(values: dict[str, int], size: int, wanted: str) -> None:
    """Breaks if a value whose dim is not as large as the name says, as where it lies otherwise, is said by the name."""
    program, _ = lowered(Attention, G)
    region = next(region for region in program.regions if region.ops)
    node = next(node for phase in region.phases.values() for node, _ in shaped(phase))
    rule = region.ops[node.meta["operator"]][1]
    result = rule.results[0]
    assert result is not None
    labels = {(region.name, node.meta["operator"], factor): ("H", "D") for dim in result for factor in dim[:1]}
    plain = [dim for dim in result if len(dim) == 1]
    index = result.index(plain[0])
    given = [size if place == index else 0 for place in range(len(result))]
    text = Sizes(values, {}, labels).shape(region, node, given)
    assert text is not None
    assert text[index] == wanted


def test_what_is_no_operator_has_no_names() -> None:
    """Breaks if a node that no rule describes makes emission fail."""
    program, _ = lowered(Attention, G)
    graph = fx.Graph()
    assert Sizes().shape(program.regions[0], graph.placeholder("x"), [2, 3]) is None
    assert Sizes().text == ""


def test_names_stand_in_one_column() -> None:
    """Breaks if the lines at the top are not in the order of the dims, or their comments not below each other."""
    sizes = Sizes({"D": 64, "B": 2}, {"B": "4/dp", "D": "64"})
    assert sizes.text == "B = 2   # rows of the batch: 4/dp\nD = 64  # elements of a head: 64"
