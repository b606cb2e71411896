"""TRL's trainers (1.x) for compiled models.

    from autopar.integrations.trl import SFTTrainer, with_log_probs        # in place of trl's
    model = autopar.compile(with_log_probs(model), mesh, strategy="zero3")
    trainer = SFTTrainer(model=model, args=args, …)

    class Kto(ForTrl, trl.KTOTrainer): …                                   # another one of theirs

TRL gives a model a second way to be called, `fused_lm_head=True`, which answers with log-probabilities of the labels in
place of logits, by kernels of its own. `with_log_probs` writes the same in torch's words, before `compile`, so that it
is planned: each rank does its rows or tokens, and nobody gathers logits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import trl
from torch import Tensor, nn
from transformers.trainer import Trainer as _Trainer
from trl.trainer.utils import FusedCausalLMOutput  # pyright: ignore[reportMissingImports]

from autopar.base.errors import AutoparError
from autopar.integrations.transformers import ForCompiled
from autopar.runtime.module import CompiledModule, check_not_compiled

Module = TypeVar("Module", bound=nn.Module)
_theirs: Any = trl
IGNORED = -100
USUAL = ("log_probs", "entropy", "mean_logits", "is_top1")
"""What SFT's and DPO's losses and logs are made of."""


def with_log_probs(model: Module, outputs: Collection[str] = USUAL) -> Module:
    """The model, which now takes `fused_lm_head=True` as TRL's models do. Before `autopar.compile`.

    outputs: of `trl.trainer.utils.FusedCausalLMOutput`, each [rows, tokens - 1]. Each beside `log_probs` costs a pass
    over the logits; "log_sum_sq_probs" is for DPO's `use_weighting`.

    Raises:
        AutoparError: the model is compiled already.
    """
    check_not_compiled(model)
    vars(model)["forward"] = _Forward(model, frozenset(outputs))
    return model


class _Forward:
    """The forward of a model that answers with log-probabilities where it is asked to."""

    def __init__(self, model: nn.Module, outputs: Collection[str]) -> None:
        self.model, self.outputs = model, outputs
        self.__wrapped__ = type(model).forward.__get__(model)  # the signature

    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        forward = type(self.model).forward.__get__(self.model)
        if not fused_lm_head:
            return forward(*args, **kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        kwargs.pop("num_items_in_batch", None)
        found = forward(*args, **kwargs)
        logits = found.logits
        if shifted is None:
            logits, shifted = logits[:, :-1], labels[:, 1:]
        return self._scored(logits.float(), shifted, getattr(found, "aux_loss", None))

    def _scored(self, logits: Tensor, labels: Tensor, aux_loss: Tensor | None) -> FusedCausalLMOutput:
        """Of logits[B, S, V] and the label of each place."""
        mask, wanted = labels != IGNORED, self.outputs
        logs = logits.log_softmax(-1)
        own = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(logs.exp() * logs).sum(-1) if "entropy" in wanted else None
        squares = (2 * logs).logsumexp(-1).detach() if "log_sum_sq_probs" in wanted else None
        mean = logits.mean(-1).detach() if "mean_logits" in wanted else None
        best = logits.argmax(-1) == labels if "is_top1" in wanted else None

        def counted(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.masked_fill(~mask, 0)

        return FusedCausalLMOutput(
            log_probs=counted(own), entropy=counted(entropy), log_sum_sq_probs=counted(squares),
            mean_logits=counted(mean), is_top1=None if best is None else best & mask, label_mask=mask,
            aux_loss=aux_loss,
        )  # fmt: skip


class ForTrl(ForCompiled):
    """Before a TRL trainer's class among the bases: has it train a compiled model. One that is not compiled is trained
    as ever.

    Raises:
        AutoparError: a compiled model without `with_log_probs`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for model in (*args[:1], kwargs.get("model"), kwargs.get("ref_model")):
            check_answers(model)
        super().__init__(*args, **kwargs)
        for model in (self.model, getattr(self, "ref_model", None)):
            if isinstance(model, CompiledModule):
                vars(model).pop("forward", None)  # TRL's, in front of the program

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As they are: what a last batch may be filled with depends on the loss, which is TRL's."""
        if not self._is_compiled():
            return super()._prepare_inputs(inputs)
        return _Trainer._prepare_inputs(self, inputs)


class SFTTrainer(ForTrl, _theirs.SFTTrainer):
    """TRL's own, for compiled models."""


class DPOTrainer(ForTrl, _theirs.DPOTrainer):
    """TRL's own, for compiled models; the reference is a second compiled one."""


def check_answers(model: Any) -> None:
    """Raises an AutoparError where a model was compiled without `with_log_probs`."""
    if not isinstance(model, CompiledModule):
        return
    forwards = [model.autopar.planned_forward, *(vars(module).get("forward") for module in model.modules())]
    if not any(isinstance(forward, _Forward) for forward in forwards):
        name = type(model).__name__
        raise AutoparError(
            f"this {name} was compiled without the log-probabilities that TRL's trainers ask for",
            remedy="Compile autopar.integrations.trl.with_log_probs(model)",
        )
