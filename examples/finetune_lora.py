"""Train LoRA adapters on a frozen model that is split over a mesh, and merge them.

    torchrun --nproc-per-node 4 examples/finetune_lora.py                        # small, on this machine's CPUs
    torchrun --nproc-per-node 8 examples/finetune_lora.py --mesh dp=2,tp=4 --model FOLDER

Lines that differ from a script for one device are marked (1) to (3). Adapters alone have gradients and optimizer
states, are reduced, and are saved; rank 0 writes. The text is cut into bytes: no tokenizer is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import autopar
from autopar.integrations.transformers import Trainer  # (1) in place of transformers' own


def main() -> None:
    options = parse_options()
    args = TrainingArguments(
        output_dir=options.output, use_cpu=not torch.cuda.is_available(), seed=0, max_steps=options.steps,
        per_device_train_batch_size=8, per_device_eval_batch_size=8, learning_rate=1e-2, lr_scheduler_type="linear",
        logging_steps=5, eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=10, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else LlamaForCausalLM(small_config())
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = get_peft_model(model, adapters)
    names, sizes = zip(*(pair.split("=") for pair in options.mesh.split(",")))
    mesh = init_device_mesh(args.device.type, tuple(map(int, sizes)), mesh_dim_names=names)  # (2)
    model = autopar.compile(model, mesh, strategy=options.strategy)  # (3)
    if args.process_index == 0:
        model.print_trainable_parameters()

    blocks = blocks_of(Path(options.text).read_bytes(), options.tokens)
    trainer = Trainer(
        model=model, args=args, train_dataset=blocks[8:], eval_dataset=blocks[:8], data_collator=default_data_collator
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    model.save_pretrained(options.output)
    with model.disable_adapter():
        before = trainer.evaluate(metric_key_prefix="base")
    after = trainer.evaluate(metric_key_prefix="adapted")
    merged = model.merge_and_unload()  # a plain model, whole, on every rank
    if args.process_index == 0:
        print(f"loss without adapters {before['base_loss']:.4f}, with them {after['adapted_loss']:.4f}")
        merged.save_pretrained(f"{options.output}/merged")
    trainer.end()


def blocks_of(text: bytes, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of a text of the same length."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = ids[: len(ids) // tokens * tokens].view(-1, tokens)
    return [{"input_ids": row, "labels": row} for row in rows]


def small_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axes, slowest link first")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, zero3, tensor")
    parser.add_argument("--model", help="a folder with a model; default a small one")
    parser.add_argument("--text", default=str(Path(__file__).parents[1] / "README.md"), help="a file to learn from")
    parser.add_argument("--tokens", type=int, default=64, help="bytes in a row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="adapters", help="folder of checkpoints and of the result")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
