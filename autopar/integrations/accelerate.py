"""An `Accelerator` whose processes are one device together, as the ranks of a compiled model are.

    from autopar.integrations.accelerate import Accelerator      # in place of accelerate's
    model, optimizer, loader = Accelerator().prepare(autopar.compile(model, mesh), optimizer, loader)

Loaders give every rank the same batch, in the order of one process; what is gathered is there once; models are not
wrapped; rank 0 saves whole tensors. `is_main_process`, printing and trackers are by rank, as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import tree_map
from autopar.runtime.module import CompiledModule
from autopar.runtime.seen_whole import whole
from autopar.runtime.state import gathered, gathered_state


class Optimizer(AcceleratedOptimizer):
    """Gives its state whole, to rank 0."""

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors on the CPU of rank 0; on others an empty one. Collective."""
        return gathered(self.optimizer.state_dict())


class Accelerator(accelerate.Accelerator):
    """See above. What concerns one process alone (mixed precision, accumulation, trackers) is accelerate's."""

    @property
    def num_processes(self) -> Any:
        """Of those that have data of their own."""
        return 1

    @property
    def process_index(self) -> Any:
        """Among those that have data of their own."""
        return 0

    @property
    def dispatch_batches(self) -> bool:
        """Whether rank 0 reads for all: every rank reads the stream."""
        return False

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model itself: compiled, it knows where its parameters lie and reduces its gradients.

        Raises:
            AutoparError: it is not compiled, and there are several ranks.
        """
        if not isinstance(model, CompiledModule):
            check_alone(self, model)
            return super().prepare_model(model, device_placement, evaluation_mode)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As accelerate's, whose `state_dict()` is whole."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = Optimizer
        return prepared

    def gather(self, tensor: Any) -> Any:
        """What every rank has already, whole."""
        return tree_map(whole, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """What every rank has already."""
        return tree_map(lambda x: x * scale if isinstance(x, Tensor) else x, self.gather(tensor))

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """It is of the same size on every rank."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Once, and without the rows that fill up a last batch; objects as they are."""
        return input_data if use_gather_object else super().gather_for_metrics(input_data)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: Any = 2) -> Any:
        """Over all ranks, each element once, with one message."""
        given = list(parameters)
        for model in self._models:
            if isinstance(model, CompiledModule) and {id(p) for p in given} == {id(p) for p in model.parameters()}:
                self.unscale_gradients()
                return model.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(given, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Whole tensors on the CPU of rank 0; on others an empty one. Collective."""
        if isinstance(model, CompiledModule):
            return gathered_state(model.autopar, model.state_dict())
        return super().get_state_dict(model, unwrap)


def check_alone(accelerator: accelerate.Accelerator, model: nn.Module) -> None:
    """Raises an AutoparError where ranks have a model that nobody keeps alike on them."""
    ranks = accelerator.state.num_processes
    if ranks > 1:
        raise AutoparError(
            f"this {type(model).__name__} is not compiled, and {ranks} ranks have one each",
            remedy="Hand in autopar.compile(model, mesh), or use accelerate's own Accelerator",
        )
