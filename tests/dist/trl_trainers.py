"""Work for test_trl: TRL's SFT and DPO trainers, on one process and on the ranks of a mesh."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import autopar
from tests.dist import script, trainer, training

WORDS = 60


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(WORDS)}}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rows(count: int, pairs: bool) -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)

    def words(number: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(0, WORDS, (number,), generator=generator).tolist())

    if not pairs:
        return Dataset.from_list([{"text": words(5 + row % 7)} for row in range(count)])
    return Dataset.from_list(
        [
            {"prompt": words(3) + " ", "chosen": words(4 + row % 5), "rejected": words(3 + row % 4)}
            for row in range(count)
        ]
    )


def run(kind: str, folder: str, sizes: dict[str, int] | None, strategy: Any, others: dict[str, Any]) -> dict[str, Any]:
    """Steps over a round whose last batch is not full: what was logged, and the parameters."""
    import trl

    from autopar.integrations import trl as ours

    trainer.as_under_torchrun(is_one=sizes is None)
    own = model()
    reference = copy.deepcopy(own).requires_grad_(False) if kind == "dpo" else None
    if sizes is not None:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        own = autopar.compile(ours.with_log_probs(own), mesh, strategy=strategy)
        if reference is not None:
            reference = autopar.compile(ours.with_log_probs(reference), mesh, strategy=strategy)
    arguments: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "max_steps": 3, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 0.1, "optim": "sgd",
        "save_strategy": "no", "bf16": False, "seed": 4, "max_grad_norm": 0.5, "eval_strategy": "steps",
        "eval_steps": 3, "max_length": 32, **others,
    }  # fmt: skip
    kinds: Any = (ours if sizes is not None else trl, trl)
    given: dict[str, Any] = {} if reference is None else {"ref_model": reference}
    made = (kinds[0].SFTTrainer if kind == "sft" else kinds[0].DPOTrainer)(
        model=own, args=(trl.SFTConfig if kind == "sft" else trl.DPOConfig)(**arguments),
        train_dataset=rows(10, kind == "dpo"), eval_dataset=rows(6, kind == "dpo"), processing_class=tokenizer(),
        **given,
    )  # fmt: skip
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    timing = ("runtime", "_per_second", "preparation_time")
    logs = [{k: x for k, x in log.items() if not k.endswith(timing)} for log in made.state.log_history]
    return {"logs": logs, "parameters": {n: script.whole(p).detach().clone() for n, p in own.named_parameters()}}


def without_log_probs(folder: str) -> str:
    """What is said of a model that was compiled without them."""
    import trl

    from autopar.integrations.trl import SFTTrainer

    trainer.as_under_torchrun()
    own: Any = autopar.compile(model(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="zero3")
    args = trl.SFTConfig(folder, use_cpu=True, bf16=False, report_to=[])
    return training.message(
        lambda: SFTTrainer(model=own, args=args, train_dataset=rows(4, False), processing_class=tokenizer())
    )
