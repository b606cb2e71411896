"""Plans that rank 0 makes and every rank has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.base.torch_compat.calls import without_trackers
from autopar.ir.batching import is_of_batch

logger = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What rank 0 sends: plans as JSON and the tensors that the capture of each lifted, or the error."""

    plans: Sequence[str]
    constants: Sequence[Mapping[str, Tensor]]
    error: str | None = None


def _lifted(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what each step finds in its batch."""
    return {name: value for name, value in constants.items() if not is_of_batch(name)}


def agreed_plan(make: Callable[[], Plan]) -> tuple[Plan, Mapping[str, Tensor]]:
    """Rank 0 plans; every rank gets the same plan and the tensors that the capture lifted, or the same error."""
    return agreed_plans(lambda: [make()])[0]


def agreed_plans(make: Callable[[], Sequence[Plan]]) -> list[tuple[Plan, Mapping[str, Tensor]]]:
    """The same of several plans that are made together."""
    plans: Sequence[Plan] = []
    box = [_Answer((), ())]
    if dist.get_rank() == 0:
        try:
            with without_trackers():
                plans = make()
            programs = [plan.program for plan in plans]
            constants = [_lifted(program.constants) for program in programs if program is not None]
            box = [_Answer([plan.without_model().to_json() for plan in plans], constants)]
        except Exception as error:
            said = str(error) if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"
            box = [_Answer((), (), said)]
            if not isinstance(error, AutoparError):
                logger.exception("planning failed")
    dist.broadcast_object_list(box, src=0)
    if box[0].error is not None:
        raise AutoparError(box[0].error)
    return list(zip(plans or [Plan.from_json(text) for text in box[0].plans], box[0].constants, strict=True))
