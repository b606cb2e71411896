"""Numbers that a forward reads of tensors and returns: outputs of the program, of the whole batch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.base.torch_compat.tracing import dump_treespec, load_treespec, tree_unflatten
from autopar.passes.capture import capture

CLASSES, ROWS = 4, 6


class Classifies(nn.Module):
    """Returns what `how` makes of logits and labels."""

    def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 8), nn.Linear(8, CLASSES), how

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.last(self.first(x).relu())
        return self.how(logits, y, F.cross_entropy(logits, y))


def _item(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    return {"loss": loss, "acc": (logits.argmax(-1) == y).float().mean().item()}


def _hits_of_rows(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    return loss, (logits.argmax(-1) == y).sum().item() / y.shape[0]


def _percent(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    return loss, 100.0 * ((logits.argmax(-1) == y).sum().item() / y.shape[0]) + 0.5


def _of_python(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    sizes = {"rows": len(y), "all": logits.shape[0] * logits.shape[1], "half": y.shape[0] * 0.5, "none": 0.0}
    return {"loss": loss, "labels": (y != 2).sum().item(), **sizes}


def _float_and_int(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    found = logits.argmax(-1) == y
    hits = int(found.sum())
    return {"loss": loss, "acc": float(found.float().mean()), "more": [hits]}


def _predictions(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    return loss, logits.argmax(-1).tolist()


def _beside_a_constant(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    hits = (logits.argmax(-1) == y).sum()
    return {"loss": loss * torch.tensor(2.0), "acc": torch.maximum(hits, torch.tensor(1)).item()}


def _batch(rows: int = ROWS) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(rows, 3), "y": torch.randint(0, CLASSES, (rows,))}


HOWS = [_item, _hits_of_rows, _percent, _of_python, _float_and_int, _predictions, _beside_a_constant]


@pytest.mark.moderate
@pytest.mark.parametrize("how", HOWS)
def test_numbers_are_of_the_whole_batch(how: Callable[..., Any]) -> None:
    """Breaks if a rank hands out the number of its own rows, or none."""
    with warnings.catch_warnings():  # that rows are gathered
        warnings.simplefilter("ignore")
        plan = autopar.plan(Classifies(how), autopar.Mesh("dp=2"), example_inputs=_batch(), strategy="ddp")
    plan.verify().raise_on_failure()


@pytest.mark.moderate
@pytest.mark.parametrize("how", HOWS)
def test_numbers_come_out_as_numbers(how: Callable[..., Any]) -> None:
    """Breaks if a tensor comes back for a number, or the structure that a plan's file has is another one."""
    model, batch = Classifies(how), _batch()
    program = capture(model, batch)
    assert not program.by_value  # labels decide nothing
    outputs, _ = interpret.run(program, interpret.state_of(model, program), interpret.input_tensors(program, batch))
    spec = load_treespec(dump_treespec(program.output_spec))
    found = tree_unflatten([outputs[i] for i in program.output_leaves if isinstance(i, int)], spec)
    eager = model(**batch)
    if isinstance(eager, dict):
        found, eager = list(found.values()), list(eager.values())
    torch.testing.assert_close(found[0], eager[0])
    for one, other in zip(found[1:], eager[1:], strict=True):
        assert type(one) is type(other)
        assert one == (other if type(other) is not float else pytest.approx(other))
    assert all("acc" not in name or name == "acc" for name in program.output_names)


def _decides(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    share = float((logits.argmax(-1) == y).float().mean())
    return (loss * 2 if share > 0.5 else loss), share


def _reckons(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    return loss, 100 * float((logits.argmax(-1) == y).float().mean())


def _scales(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    scale = float(logits.detach().abs().max())
    return loss / scale, scale


def _prints(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    print(f"{loss.item():.3f}")
    return loss


def _names(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    return {f"{loss.item():.3f}": loss}


@pytest.mark.parametrize("how", [_decides, _reckons, _scales])
def test_plain_numbers_that_more_is_done_with_are_refused(how: Callable[..., Any]) -> None:
    """Breaks if what `float(x)` gives in a trace decides or scales as if it were the number."""
    with pytest.raises(AutoparError, match=r"by the value of a tensor.*test_handed_out_numbers\.py"):
        capture(Classifies(how), _batch())


@pytest.mark.moderate
def test_numbers_are_not_written_down() -> None:
    """Breaks if a text of a number that nobody has is a traceback of Python's, or is printed without a word of it."""
    assert "test_handed_out_numbers.py" in " ".join(capture(Classifies(_prints), _batch()).notes)
    with pytest.raises(AutoparError, match=r"test_handed_out_numbers\.py"):
        capture(Classifies(_names), _batch())


@pytest.mark.moderate
def test_many_numbers_are_refused() -> None:
    """Breaks if a program has an output for every token."""
    with pytest.raises(AutoparError, match=r"returns 65 numbers .*: a program returns 64 at most.*\.detach\(\)"):
        capture(Classifies(_predictions), _batch(rows=65))


def _a_time(logits: Tensor, y: Tensor, loss: Tensor) -> Any:
    return {"loss": loss, "time": time.perf_counter()}


@pytest.mark.moderate
def test_a_number_of_each_call_is_refused() -> None:
    """Breaks if a time, or a counter, comes back as it was when the program was made."""
    with pytest.raises(AutoparError, match="another one each time"):
        capture(Classifies(_a_time), _batch())
