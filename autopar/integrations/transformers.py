"""transformers' Trainer for compiled models.

    from autopar.integrations.transformers import Trainer        # in place of transformers'
    trainer = Trainer(model=autopar.compile(model, mesh), args=args, …)

    class Sft(ForCompiled, trl.SFTTrainer): …                    # of another library's Trainer

The ranks are one device together: a batch has `per_device_train_batch_size` rows, whatever the mesh, and the numbers
are those of one process with the same arguments. Checkpoints are too: whole tensors, that any mesh goes on from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.trainer import Trainer as _Theirs

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import tree_map
from autopar.integrations.accelerate import Accelerator
from autopar.runtime.module import CompiledModule
from autopar.runtime.state import gathered_state
from autopar.strategies.pipelining.spec import AXIS

REFUSED = {
    "fsdp": 'autopar shards the model: autopar.compile(model, mesh, strategy="zero3")',
    "deepspeed": 'autopar shards the model and its optimizer: autopar.compile(model, mesh, strategy="zero3")',
    "parallelism_config": "autopar.compile was given the mesh and the strategy",
    "save_on_each_node": "rank 0 writes: use a folder that all nodes see",
}
"""Arguments that say again, or otherwise, what is decided."""


_Trainer: Any = object
"""What stands behind `ForCompiled` among the bases."""


class ForCompiled(_Trainer):
    """Before a Trainer's class among the bases: has it train a compiled model. One that is not compiled is trained as
    ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # transformers' word for: it lies as it is to, reduces its gradients, and all ranks save it together.
        self.is_distributed_loading_by_transformers = self._is_compiled()

    def _is_compiled(self) -> bool:
        return isinstance(self.model, CompiledModule)

    def create_accelerator_and_postprocess(self) -> None:
        """With the one that knows such models; `model_init` is to make one.

        Raises:
            AutoparError: arguments that do not go with a compiled model.
        """
        model = self.model
        if isinstance(model, CompiledModule):
            check_arguments(self.args, model)
        super().create_accelerator_and_postprocess()
        if model is None or isinstance(model, CompiledModule):
            self.accelerator.__class__ = Accelerator

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a step."""
        if not self._is_compiled():
            return super().get_total_train_batch_size(args)
        return self._train_batch_size * args.gradient_accumulation_steps

    def _prepare_inputs(self, inputs: Any) -> Any:
        """With a last batch filled up, so that no row is left over where the mesh does not divide it, and nothing is
        planned for it. The rows that fill it have no labels: they are no items of a loss, nor in what is evaluated.
        """
        inputs = super()._prepare_inputs(inputs)
        if not self._is_compiled() or self.compute_loss_func is not None or not leaves_out_rows(self.model):
            return inputs
        if self.model.training:
            return filled(inputs, self._train_batch_size)
        state, rows = self.accelerator.gradient_state, num_rows(inputs)
        is_cut = state.end_of_dataloader and state.remainder == rows
        return filled(inputs, self.args.eval_batch_size) if is_cut else inputs

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Without the rows that filled a batch up, which a Seq2SeqTrainer hands to metrics."""
        rows = num_rows(inputs)
        found = super().prediction_step(model, inputs, *args, **kwargs)
        if not self._is_compiled() or not rows:
            return found
        loss, *others = found
        return (loss, *tree_map(lambda x: x[:rows] if isinstance(x, Tensor) and x.ndim else x, others))

    def floating_point_ops(self, inputs: Any) -> Any:
        """This rank's part: they are summed up."""
        total = super().floating_point_ops(inputs)
        return total / self.args.world_size if self._is_compiled() else total

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._is_compiled() and not self.args.should_save:
            self.optimizer.state_dict()  # rank 0 asks too, and writes
        super()._save_optimizer_and_scheduler(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._is_compiled() and state_dict is None and not hasattr(self.model, "save_pretrained"):
            state_dict = gathered_state(self.model.autopar, self.model.state_dict())
        super()._save(output_dir, state_dict)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Also where the checkpoint is of fewer ranks: all go on as rank 0 does."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and self._is_compiled():
            share_random_states()


class Trainer(ForCompiled, _Theirs):
    """transformers' own, for compiled models."""


def check_arguments(args: Any, model: CompiledModule) -> None:
    """Raises an AutoparError where the arguments say otherwise than the mesh, or than a compiled model can do."""
    name, ranks, axes = type(model).__name__, dist.get_world_size(), model.autopar.comm.axes
    for argument, why in REFUSED.items():
        if getattr(args, argument, None):
            raise AutoparError(f"this {name} is compiled, and TrainingArguments({argument}=…) is given", remedy=why)
    if args.world_size != ranks:
        raise AutoparError(
            f"the TrainingArguments know of {args.world_size} process, the mesh has {ranks} ranks",
            remedy="Start under torchrun; on CPUs set TrainingArguments(use_cpu=True), without which transformers "
            "takes each process for the only one",
        )
    if AXIS in axes:
        raise AutoparError(
            f"this {name} was compiled with a pipeline, and the Trainer goes forward and backward by itself",
            remedy=f"Use a mesh without {AXIS}, or a loop of your own with model.train_step(**batch)",
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise AutoparError(
            "train_sampling_strategy='batch_rebalance' gives each rank other rows; a compiled model takes the same",
            remedy="Use 'random', 'sequential' or 'group_by_length'",
        )


NO_LABEL = -100
KNOWN_LOSSES = ("ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification")
"""transformers' losses in which a row without labels is as if it were not there."""


def leaves_out_rows(model: Any) -> bool:
    """Whether neither the loss nor anything else in the model depends on rows that have no labels."""
    loss = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
    routes = getattr(getattr(model, "config", None), "output_router_logits", False)
    return getattr(loss, "__name__", None) in KNOWN_LOSSES and not routes


def num_rows(inputs: Mapping[str, Any]) -> int | None:
    """Of a batch; None where its tensors have other first dims."""
    counts = {len(x) if x.ndim else 0 for x in inputs.values() if isinstance(x, Tensor)}
    return counts.pop() if len(counts) == 1 else None


def filled(inputs: Mapping[str, Any], size: int) -> Any:
    """The batch with copies of its first row up to `size`, without their labels; as it is where it is no such batch."""
    rows, labels = num_rows(inputs), inputs.get("labels")
    if not rows or rows >= size or (isinstance(labels, Tensor) and labels.is_floating_point()):
        return inputs

    def fill(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        more = x[:1].expand(size - rows, *x.shape[1:])
        return torch.cat([x, torch.full_like(more, NO_LABEL) if name == "labels" else more])

    return {name: fill(name, x) for name, x in inputs.items()}


def share_random_states() -> None:
    """Rank 0's of Python, numpy and torch, on every rank. Collective."""
    states = [(random.getstate(), np.random.get_state(), torch.random.get_rng_state())]
    dist.broadcast_object_list(states, src=0)
    python, numpys, torchs = states[0]
    random.setstate(python)
    np.random.set_state(numpys)
    torch.random.set_rng_state(torchs)
