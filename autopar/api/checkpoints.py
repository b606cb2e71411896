"""Load what torch.distributed.checkpoint has saved, without running anything that is in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.checkpoints import DataPlanner, DataReader


def load_checkpoint(state: dict[str, Any], folder: str | Path) -> None:
    """Fill `state` in place, as `torch.distributed.checkpoint.load(state, checkpoint_id=folder)` does.

    torch unpickles what is in the folder and so runs what its author likes; here the folder is data: tensors, numbers,
    texts, lists and mappings. All ranks call it.

    Args:
        state: of `state_dict()`, or of `torch.distributed.checkpoint.state_dict.get_state_dict`.
        folder: what `torch.distributed.checkpoint.save` has written.

    Raises:
        AutoparError: a folder that is damaged, names code or files elsewhere, or lacks what `state` has.
    """
    reader = DataReader(folder)
    try:
        dcp.load(state, storage_reader=reader, planner=DataPlanner())
    except CheckpointException as error:
        own = [each for each, _ in error.failures.values() if isinstance(each, AutoparError)]
        own += [] if reader.error is None else [reader.error]
        if own:
            raise own[0] from error
        first = next(iter(error.failures.values()))[0]
        raise AutoparError(
            "the checkpoint cannot be loaded",
            where=str(folder),
            values=f"{type(first).__name__}: {str(first)[:300]}",
            remedy="load it into the model and optimizer that it was saved of",
        ) from error
