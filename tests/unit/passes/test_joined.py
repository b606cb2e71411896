"""Parts of tensors that are joined: what is known of one of them is known where a forward takes it out again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.joined import computed_by, nodes_in
from tests.unit.passes.usual import planned, ran


class Pools(nn.Module):
    """Packs keys with a mask, takes them apart in some words, and keeps the pools in which the mask is set.

    how: the words. written: whether something is written into what is joined.
    """

    def __init__(self, how: str, written: str = "") -> None:
        super().__init__()
        self.keys, self.how, self.written = nn.Linear(8, 8), how, written

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        marks = torch.ones(x.shape[:2], dtype=torch.bool)[..., None].to(x.dtype)
        packed = torch.cat([self.keys(x), marks], -1)
        if self.written == "joined":
            packed[..., -1] = 0
        elif self.written == "part":
            marks.zero_()
        if self.how == "split":
            keys, valid = packed.split([8, 1], -1)
            valid = valid.squeeze(-1)
        elif self.how == "chunk":
            keys, valid = packed[..., :8], packed.chunk(9, -1)[8].squeeze(-1)
        elif self.how == "slice":
            keys, valid = packed[..., :-1], packed[:, :, 8:].squeeze(-1)
        else:
            keys, valid = packed[..., :8], packed.select(2, -1)
        valid = valid + marks.squeeze(-1)
        places = torch.arange(-(-length // 4) * 4)
        inside = (places < length).view(-1, 4).all(-1)
        places = places.clamp(max=length - 1)
        keep = (valid.bool()[:, places].unflatten(1, (-1, 4)).all(-1) & inside).any(0)
        pools = keys[:, places].unflatten(1, (-1, 4)).mean(2)
        pools = pools.mT[..., keep].mT if self.how == "slice" else pools[:, keep]
        scores = (x @ pools.transpose(1, 2)).topk(2, -1)
        return scores.values.softmax(-1).square().mean() + pools.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("length", [12, 14])
@pytest.mark.parametrize("how", ["split", "chunk", "slice", "select"])
def test_a_mask_that_is_packed_with_keys_is_known(how: str, length: int) -> None:
    """Breaks if a mask of Python's own numbers chooses rows that nobody counts, for it lay beside numbers that are
    unknown, or if it takes others than eager's.
    """
    torch.manual_seed(0)
    plan = planned(Pools(how), x=torch.randn(4, length, 8))
    assert not any("granted" in note for note in plan.notes) and plan.verify().ok


@pytest.mark.moderate
@pytest.mark.parametrize("written", ["joined", "part"])
def test_what_is_written_into_joined_tensors_is_not_what_was_joined(written: str) -> None:
    """Breaks if a mask counts as the one that was packed after others were written over it, or the other way round."""
    torch.manual_seed(0)
    with pytest.raises(AutoparError, match="topk does not treat alone each row that a mask chooses"):
        planned(Pools("select", written), x=torch.randn(4, 12, 8))


class Marks(nn.Module):
    """Keeps images that the example's own pixels mark, which are joined with what is not known; `at`: their dim."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear, self.at = nn.Linear(8, 8), at

    def forward(self, images: Tensor) -> Tensor:
        real = (images != 0).any(-1).any(0)
        joined = torch.cat([self.linear(images).mean((0, 2)), real.to(images.dtype)])
        keep = joined[images.shape[1] :].bool()
        y = self.linear(images)
        y = y[:, keep] if self.at == 1 else y.transpose(1, 2)[..., keep].transpose(1, 2)
        return y.topk(2, 1).values.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("at", [1, 2])
def test_a_mask_beside_a_dim_that_the_pixels_fill_takes_everything(at: int) -> None:
    """Breaks if a batch with an image that is left out gives a number, or one without is refused."""
    torch.manual_seed(0)
    full, less = torch.randn(8, 3, 8), torch.randn(8, 3, 8)
    less[:, 1] = 0.0
    model = Marks(at)
    plan = planned(model, images=full)
    assert any("a mask takes everything" in note for note in plan.notes) and plan.verify().ok
    batch = {"images": full}
    torch.testing.assert_close(ran(model, batch, batch), model(**batch))
    assert ran(model, batch, {"images": less}).isnan()


def test_parts_of_joined_tensors_are_those_of_one() -> None:
    """Breaks if a part is read off another tensor, at another place, or cast ones count as what they were."""

    def forward(x: Tensor, y: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat([x, y, x], 1)
        mixed = torch.cat([x, whole], 1)
        parts = (joined[:, 3:4], joined[:, 1:3], joined.select(1, -1), joined[:1], joined[:, 2:4:2], mixed[:, 2:])
        return (*parts, *joined.split([2, 2, 2], 1), *joined.chunk(2, 1))

    made = (torch.arange(4.0).view(2, 2), 4 + torch.arange(4.0).view(2, 2), torch.ones(2, 1, dtype=torch.long))
    graph = make_fx(forward, tracing_mode="fake")(*made).graph
    (results,) = graph.output_node().args
    inputs = dict(zip((node for node in graph.nodes if node.op == "placeholder"), made, strict=True))
    eager = forward(*made)
    found = [nodes_in(computed_by(node)) for node in results]
    x, y, _ = inputs
    assert [place for place, each in enumerate(found) if each == [y]] == [0, 7]
    assert [place for place, each in enumerate(found) if each == [x]] == [2, 6, 8]
    for node, wanted in zip(results, eager, strict=True):
        target, args, kwargs = computed_by(node)
        if set(nodes_in((target, args, kwargs))) <= set(inputs):
            torch.testing.assert_close(target(*map_arg(args, inputs.__getitem__), **kwargs), wanted)
