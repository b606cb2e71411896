"""Train with transformers' Trainer on a mesh: the shape of transformers' own language-modeling example.

    torchrun --nproc-per-node 4 examples/finetune_trainer.py                     # small, on this machine's CPUs
    torchrun --nproc-per-node 4 examples/finetune_trainer.py --steps 40 --resume # goes on from the last checkpoint
    torchrun --nproc-per-node 8 examples/finetune_trainer.py --mesh dp=2,tp=4 --text FILE

Lines that differ from a script for one device are marked (1) to (3). A batch has `per_device_train_batch_size` rows,
whatever the mesh, so that the numbers are those of one device. The text is cut into bytes: no tokenizer is needed.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator, set_seed

import autopar
from autopar.integrations.transformers import Trainer  # (1) in place of transformers' own


def main() -> None:
    options = parse_options()
    args = TrainingArguments(
        output_dir=options.output, use_cpu=not torch.cuda.is_available(), seed=0, max_steps=options.steps,
        per_device_train_batch_size=8, per_device_eval_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=4, weight_decay=0.1, max_grad_norm=1.0,
        logging_steps=4, eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=10,
        load_best_model_at_end=True, metric_for_best_model="loss", save_total_limit=2, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    text = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8).long()
    num_train = len(text) * 9 // 10
    train, validation = Blocks(text[:num_train], options.tokens), Blocks(text[num_train:], options.tokens)

    set_seed(args.seed)
    model = LlamaForCausalLM(small_config())
    names, sizes = zip(*(pair.split("=") for pair in options.mesh.split(",")))
    mesh = init_device_mesh(args.device.type, tuple(map(int, sizes)), mesh_dim_names=names)  # (2)
    model = autopar.compile(model, mesh, strategy=options.strategy)  # (3)

    trainer = Trainer(
        model=model, args=args, train_dataset=train, eval_dataset=validation, data_collator=default_data_collator
    )
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    metrics = {**result.metrics, **trainer.evaluate()}
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("all", metrics)
    trainer.save_metrics("all", metrics)
    trainer.save_state()
    trainer.end()


class Blocks(Dataset):
    """Pieces of a text of the same length."""

    def __init__(self, text: torch.Tensor, tokens: int) -> None:
        self.blocks = text[: len(text) // tokens * tokens].view(-1, tokens)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[place], "labels": self.blocks[place]}


def small_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axes, slowest link first")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, zero3, tensor")
    parser.add_argument("--text", default=str(Path(__file__).parents[1] / "README.md"), help="a file to learn from")
    parser.add_argument("--tokens", type=int, default=64, help="bytes in a row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="finetuned", help="folder of checkpoints and of the result")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
