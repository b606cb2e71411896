"""An `Accelerator` whose processes are one device together, as the ranks of a compiled model are.

    from autopar.integrations.accelerate import Accelerator      # in place of accelerate's
    model, optimizer, loader = Accelerator().prepare(autopar.compile(model, mesh), optimizer, loader)

Loaders give every rank the same batch, in the order of one process; what is gathered is there once; models are not
wrapped; rank 0 saves whole tensors. `is_main_process`, printing and trackers are by rank, as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
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
    def dispatch_batches(self) -> bool:
        """Whether rank 0 reads for all: every rank reads the stream."""
        return False

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model itself: compiled, it knows where its parameters lie and reduces its gradients.

        Raises:
            AutoparError: it is not compiled, and there are several ranks; or accelerate does not know of them.
        """
        if not isinstance(model, CompiledModule):
            check_alone(self, model)
            return super().prepare_model(model, device_placement, evaluation_mode)
        known, ranks = self.state.num_processes, dist.get_world_size()
        if known != ranks:
            raise AutoparError(
                f"accelerate knows of {known} process, the mesh has {ranks} ranks",
                remedy="Start under torchrun; on CPUs make it with Accelerator(cpu=True), without which accelerate "
                "takes each process for the only one",
            )
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As accelerate's, whose `state_dict()` is whole."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = Optimizer
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """One that goes one step on where accelerate's goes as many as there are processes."""
        prepared: Any = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
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
            return OrderedDict(gathered_state(model.autopar, model.state_dict()))
        return super().get_state_dict(model, unwrap)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As accelerate's; compiled models take their pieces of what is read."""
        handle = self.register_load_state_pre_hook(load_compiled)
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()


def load_compiled(models: list[nn.Module], folder: str) -> None:
    """Load the compiled ones from what `save_state` wrote, and take them off the list."""
    for number, model in list(enumerate(models)):
        if not isinstance(model, CompiledModule):
            continue
        suffix = f"_{number}" if number else ""
        path = Path(folder, f"{SAFE_MODEL_NAME}{suffix}.safetensors")
        plain = Path(folder, f"{MODEL_NAME}{suffix}.bin")
        state = load_file(path) if path.exists() else torch.load(plain, map_location="cpu", weights_only=True)
        named = list(model.named_parameters(remove_duplicate=False))
        known = {id(parameter): state[name] for name, parameter in named if name in state}
        for name, parameter in named:  # tied ones are written once
            if name not in state and id(parameter) in known:
                state[name] = known[id(parameter)]
        model.load_state_dict(state)
        models.remove(model)


def check_alone(accelerator: accelerate.Accelerator, model: nn.Module) -> None:
    """Raises an AutoparError where ranks have a model that nobody keeps alike on them."""
    ranks = accelerator.state.num_processes
    if ranks > 1:
        raise AutoparError(
            f"this {type(model).__name__} is not compiled, and {ranks} ranks have one each",
            remedy="Hand in autopar.compile(model, mesh), or use accelerate's own Accelerator",
        )
