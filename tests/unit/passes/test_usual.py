"""The usual case of what values decide: early exits, masks and tests of an example's pixels, guarded at run time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.ir.sharding import Shard
from autopar.passes.capture import capture
from tests.unit.passes.usual import planned, ran


class Decoder(nn.Module):
    """Steps until every row has said the last word."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), last

    def forward(self, x: Tensor) -> Tensor:
        said: list[Tensor] = []
        for _ in range(3):
            x = torch.tanh(self.linear(x))
            said.append(x)
            if torch.stack(said, 1).argmax(-1).eq(self.last).any(-1).all():
                break
        return torch.stack(said, 1)


class Images(nn.Module):
    """Leaves out images of zeros alone; negative pixels are another matter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        images = images.flatten(0, 1)
        real = (images == 0).sum(-1) != images.shape[1]
        if not any(real):
            real[0] = True
        y = self.linear(images[real].contiguous())
        return y.square().mean() if images.min() < 0 else y.abs().mean()


class Marked(nn.Module):
    """Takes the tokens that labels do not leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.linear(x)[labels != -100].square().mean()


class Guarded(nn.Module):
    """Raises where labels or numbers are not what they have to be; `how` says in which words."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.how == "and":
            if labels is not None and labels.max() >= 8:
                raise ValueError("no such class")
        elif self.how == "or":
            if torch.any(x > 100) or not torch.isfinite(x).all():
                words = "numbers are too large"
                raise ValueError(words)
        elif self.how == "assert":
            assert (x < 100).all() and x.dim() == 2, "numbers are too large"
        elif self.how == "else":
            if bool((x < 100).all().item()):
                x = x * 2
            else:
                raise ValueError("ü")
        elif self.how == "branch":
            if x.sum() > 1000:
                x = x * 2
        return self.linear(x).square().mean()


@pytest.mark.moderate
def test_a_loop_that_may_end_early_runs_to_its_end() -> None:
    """Breaks if it is refused, or nobody is told what is taken for granted."""
    plan = planned(Decoder(99), x=torch.randn(8, 8))
    (note,) = (note for note in plan.notes if "takes for granted" in note)
    assert "is as here (test_usual.py:" in note and note.endswith(
        "a batch for which it is not so gets a program of its own"
    )
    assert plan.verify().ok


@pytest.mark.moderate
def test_where_a_loop_does_end_early_outputs_are_nan() -> None:
    """Breaks if such a step gives other numbers than eager's without a sign."""
    model, batch = Decoder(3), {"x": torch.randn(8, 8)}
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.zero_()
    assert not ran(model, batch, batch).isnan().any()
    with torch.no_grad():
        model.linear.bias[3] = 1.0
    assert model(**batch).shape[1] == 1
    assert ran(model, batch, batch).isnan().all()


@pytest.mark.moderate
def test_a_mask_that_the_pixels_fill_takes_everything() -> None:
    """Breaks if a batch whose images are all real is refused, or one with an empty image computes something else."""
    torch.manual_seed(0)
    full, less = torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    less[3, 1] = 0.0
    plan = planned(Images(), images=full)
    assert any("a mask takes everything" in note for note in plan.notes) and plan.verify().ok
    model = Images()
    batch, other = {"images": full}, {"images": less}
    wanted = model(**batch)
    torch.testing.assert_close(ran(model, batch, batch), wanted)
    assert ran(model, batch, other).isnan() and ran(model, batch, {"images": full.abs()}).isnan()
    plan = planned(Images(), images=less)
    assert not any("a mask takes everything" in note for note in plan.notes) and plan.verify().ok


@pytest.mark.moderate
def test_gradients_are_zero_where_outputs_are_nan() -> None:
    """Breaks if a batch that is unusual ruins the parameters."""
    images = torch.randn(8, 2, 8)
    model = Images()
    ran(model, {"images": images}, {"images": images.abs()}).backward()
    assert model.linear.weight.grad is not None and not model.linear.weight.grad.any()


@pytest.mark.moderate
def test_what_labels_say_is_not_taken_for_granted() -> None:
    """Breaks if a mask that is another in every batch is taken to be full since the example's is."""
    plan = planned(Marked(), x=torch.randn(8, 16, 8), labels=torch.randint(8, (8, 16)))
    assert not plan.notes and plan.verify().ok


class Padded(nn.Module):
    """Forgets a mask that marks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids * 0.0
        mask[ids == 0] = 1.0
        padding, x = mask > 0, self.table(ids)
        if not padding.any().item():
            return self.linear(x).square().mean()
        return self.linear(x.masked_fill(padding[..., None], 0.0)).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("length", [4, 16])
def test_whether_a_mask_marks_anything_is_taken_as_it_is(length: int) -> None:
    """Breaks if such a test is refused, of rows with few tokens, too, or a batch for which it is not so goes on."""
    ids = torch.randint(1, 16, (8, length))
    padded = ids.clone()
    padded[:, -1] = 0
    before = padded.clone()
    for given, other in ((ids, padded), (padded, ids)):
        model = Padded()
        plan = planned(model, ids=given)
        assert any("what is asked for is as here (test_usual.py:" in note for note in plan.notes)
        assert plan.verify().ok
        torch.testing.assert_close(ran(model, {"ids": given}, {"ids": given}), model(given))
        assert ran(model, {"ids": given}, {"ids": other}).isnan()
    assert torch.equal(padded, before)


class Rewrites(Padded):
    """Changes its own input before it asks."""

    def forward(self, ids: Tensor) -> Tensor:
        ids[ids == 3] = 0
        return super().forward(ids)


@pytest.mark.moderate
def test_what_is_asked_of_a_mask_changes_no_batch() -> None:
    """Breaks if what a model does to its input while its values are looked at is done to the example."""
    ids = torch.arange(64).reshape(4, 16) % 16
    before = ids.clone()
    with pytest.raises(AutoparError, match="changes its own input"):
        planned(Rewrites(), ids=ids)
    assert torch.equal(ids, before)


class Whole(nn.Module):
    """Says only which class an image is of, as long as its pixels are not negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images).argmax(-1) if images.min() >= 0 else self.linear(images).argmin(-1)


def test_outputs_that_cannot_be_nan_are_refused() -> None:
    """Breaks if a model that returns whole numbers alone goes on without a guard."""
    with pytest.raises(AutoparError, match="nothing that the model returns could say that it is not"):
        capture(Whole(), {"images": torch.rand(8, 8)})
    assert planned(Whole(), images=torch.rand(8, 8)).interface.branches


class Albums(nn.Module):
    """Takes images apart by how many are real of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        real = (images != 0).any(-1)
        rows = self.linear(images.flatten(0, 1)).split(real.sum(1).tolist())
        return torch.stack([row.square().mean() * (i + 1) for i, row in enumerate(rows)])


@pytest.mark.moderate
def test_numbers_that_are_asked_for_are_those_of_the_example() -> None:
    """Breaks if `tolist` of what pixels say is refused, or taken for other pixels without a sign."""
    torch.manual_seed(0)
    model, batch = Albums(), {"images": torch.randn(4, 3, 8)}
    torch.testing.assert_close(ran(model, batch, batch), model(**batch))
    other = batch["images"].clone()
    other[1, 2] = 0.0
    assert ran(model, batch, {"images": other}).isnan().all()


class Marker(nn.Module):
    """Puts one learned row where tokens say."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.row = nn.Embedding(16, 8), nn.Parameter(torch.randn(8))

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.table(tokens)
        y[tokens == 3] = self.row
        return y.square().mean()


@pytest.mark.moderate
def test_one_row_that_is_put_where_a_mask_says() -> None:
    """Breaks if the gradient of such a row is of a size by value: then there is no program, or an error of torch's."""
    torch.manual_seed(0)
    plan = planned(Marker(), tokens=torch.randint(4, (8, 16)))
    assert not plan.notes and plan.verify().ok


class Indicators(nn.Module):
    """Puts rows of its own where some tokens stand, if any does."""

    def __init__(self, how: str = "method") -> None:
        super().__init__()
        self.table, self.rows, self.how = nn.Embedding(16, 8), nn.Parameter(torch.randn(2, 8)), how

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.table(tokens)
        for number in range(2):
            mask = tokens == number
            if self.how == "method":
                if mask.any():
                    y[mask] = self.rows[number].to(y.device, y.dtype)
            elif self.how == "function":
                if torch.any(mask):
                    y[mask] = self.rows[number].view(-1)
            elif self.how == "called":
                if mask.any():
                    y[mask] = nn.functional.dropout(self.rows[number], training=self.training)
            elif self.how == "else":
                if mask.any():
                    y[mask] = self.rows[number]
                else:
                    y = y * 2
            elif mask.any():
                y[mask] = self.rows[number]
                y = y + 1
        return y.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("how", ["method", "function"])
def test_what_is_written_where_a_mask_is_set_is_written_without_a_test(how: str) -> None:
    """Breaks if such a branch is refused, guarded, or left out where the mask is set."""
    torch.manual_seed(0)
    model, tokens = Indicators(how), torch.randint(1, 16, (8, 16))
    plan = planned(model, tokens=tokens)
    assert not plan.notes and plan.verify().ok
    for other in (tokens, tokens.clamp(min=2), torch.zeros_like(tokens)):
        torch.testing.assert_close(ran(model, {"tokens": tokens}, {"tokens": other}), model(tokens=other))


@pytest.mark.moderate
@pytest.mark.parametrize("how", ["called", "else", "more"])
def test_a_branch_that_does_more_than_write_is_guarded(how: str) -> None:
    """Breaks if what a branch does besides is done where eager does not."""
    model, tokens = Indicators(how).eval(), torch.randint(2, 16, (8, 16))
    assert any("what is asked for is as here" in note for note in planned(model, tokens=tokens).notes)
    torch.testing.assert_close(ran(model, {"tokens": tokens}, {"tokens": tokens}), model(tokens=tokens))
    assert ran(model, {"tokens": tokens}, {"tokens": tokens.clamp(max=8) % 8}).isnan()


class Languages(nn.Module):
    """An adapter for each language; which a row has, a default says."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.adapter = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor, language: int = 0) -> Tensor:
        y, languages = self.table(tokens), language * torch.ones(len(tokens), dtype=torch.long)
        new = torch.zeros_like(y)
        mask = languages == language
        new[mask] = self.adapter(y[mask])
        return (new + y).square().mean()


@pytest.mark.moderate
def test_masks_that_are_known_read_and_write_everything() -> None:
    """Breaks if a mask that Python's own numbers set makes a size by value, or a guard of what cannot change."""
    torch.manual_seed(0)
    model, batch = Languages(), {"tokens": torch.randint(16, (8, 12))}
    plan = planned(model, **batch)
    assert not plan.notes and plan.verify().ok
    torch.testing.assert_close(ran(model, batch, batch), model(**batch))


@pytest.mark.moderate
@pytest.mark.parametrize("how", ["and", "or", "assert", "else"])
def test_checks_pass_and_where_they_do_not_outputs_are_nan(how: str) -> None:
    """Breaks if a check is refused, or what eager raises for gives a number without a sign, or a sum that is not what
    the check lets pass.
    """
    labels = torch.arange(72).view(8, 9) % 8  # more numbers a row than may decide by value
    model, batch = Guarded(how), {"x": torch.randn(8, 8), "labels": labels}
    plan = planned(Guarded(how), **batch)
    assert sum("that the check at test_usual.py:" in note for note in plan.notes) == 1 and plan.verify().ok
    assert not any("whole on every rank" in note for note in plan.notes)
    torch.testing.assert_close(ran(model, batch, batch), model(**batch))
    other = {"x": batch["x"], "labels": batch["labels"] + 1} if how == "and" else {**batch, "x": batch["x"] + 200}
    with pytest.raises((ValueError, AssertionError)):
        model(**other)
    assert ran(model, batch, other).isnan()


@pytest.mark.moderate
def test_a_branch_without_a_raise_is_no_check() -> None:
    """Breaks if what a test decides is left out because a test is there."""
    x = torch.randn(8, 8)
    plan = planned(Guarded("branch"), x=x)
    assert any("that what is asked for is as here" in note for note in plan.notes)


class Positions(nn.Module):
    """Makes what it is not given out of tokens, as models of pictures and text do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(16, 8), nn.Embedding(64, 8)

    def made(self, tokens: Tensor) -> Tensor:
        rows = [torch.arange(row.count(3) + len(row))[-len(row) :] for row in tokens.tolist()]
        return torch.stack([torch.stack(rows)] * 3)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if tokens is not None and position_ids is None:
            position_ids = self.made(tokens)
        return (self.embed(tokens) * self.places(position_ids).prod(0)).square().mean()


@pytest.mark.moderate
def test_what_a_forward_makes_of_tokens_may_be_handed_in() -> None:
    """Breaks if the way out is not told, or an input whose first dim is not the batch cannot be split over one."""
    model, tokens = Positions(), torch.randint(16, (4, 12))
    with pytest.raises(AutoparError, match=r"make position_ids yourself and hand it in.*\(test_usual\.py:\d+\)"):
        planned(model, tokens=tokens)
    plan = planned(model, tokens=tokens, position_ids=model.made(tokens))
    assert plan.verify().ok
    (entry,) = (entry for entry in plan.interface.inputs if entry.name == "position_ids")
    assert entry.sharding == (Shard(1),)


@pytest.mark.moderate
def test_an_input_without_rows_stays_whole_and_says_so() -> None:
    """Breaks if weights of classes are refused because they do not divide, or a batch that does not divide is taken for
    such.
    """

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            return (self.linear(x).square() * weights).sum()

    plan = planned(Weighted(), x=torch.randn(4, 8), weights=torch.rand(3))
    assert plan.verify().ok
    assert any("input weights f32[3] is whole on every rank of dp" in note for note in plan.notes)
    with pytest.raises(AutoparError, match="a batch of 3 cannot split over dp=2"):
        planned(Weighted(), x=torch.randn(3, 8), weights=torch.rand(3))


class Density(nn.Module):
    """A mixture density network: torch.distributions checks what it is handed, and samples. It is asked to: where
    Dynamo was loaded before, it no longer does by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits, mean, scale = self.trunk(x).chunk(3, -1)
        parts = torch.distributions.Normal(mean, nn.functional.softplus(scale) + 1e-3, validate_args=True)
        mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=logits), parts)
        return -mixture.log_prob(y).mean() + parts.rsample().square().mean()


@pytest.mark.moderate
def test_checks_of_distributions() -> None:
    """Breaks if a check inside torch.distributions is refused, or is told without the model's own line."""
    plan = planned(Density(), x=torch.randn(8, 8), y=torch.randn(8))
    assert plan.verify().ok
    assert any("distribution.py" in note and "called at test_usual.py:" in note for note in plan.notes)


class Kept(nn.Module):
    """Blocks that take the positions which some row marks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        keep = marks.bool().any(0)
        for block in self.blocks:
            x = x + block(x[:, keep].unsqueeze(1)).squeeze(1)
        return x


@pytest.mark.parametrize(("count", "traces"), [(6, 1), (None, 2)])
def test_what_takes_no_chosen_rows_is_traced_once(
    count: int | None, traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if a trace that was given up has the one that serves made again for other numbers of rows; or if one with
    rows that a mask chooses is not.
    """
    made, export = [], torch.export.export

    def counted(model: nn.Module, *args: object, **options: object) -> object:
        found = export(model, *args, **options)  # type: ignore[arg-type]
        made.append(found)
        return found

    monkeypatch.setattr(torch.export, "export", counted)
    model: nn.Module = Kept()
    if count is None:
        model.forward = lambda x, marks: model.blocks[0](x[marks.bool()]).square().mean()  # type: ignore[index, method-assign]
    capture(model, {"x": torch.randn(4, 6, 8), "marks": torch.ones(4, 6)}, training=True)
    assert len(made) == traces
