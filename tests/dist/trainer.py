"""Work for test_trainer: a script for transformers' Trainer, on one process and on the ranks of a mesh."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.utils import logging

import autopar
from autopar.integrations.accelerate import Accelerator
from autopar.integrations.transformers import Trainer
from tests.dist import script, training
from tests.dist.training import as_under_torchrun

Model = Any
VOCABULARY = 48


def model(dropout: float = 0.0) -> Model:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=dropout,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up; of some, labels are left out, so that batches have other numbers of items."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        start, stride = torch.randint(VOCABULARY, (2,), generator=generator).tolist()
        ids = (start + (1 + stride % 4) * torch.arange(16)) % VOCABULARY
        labels = ids.clone()
        labels[: number % 9] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def accuracy(prediction: Any) -> dict[str, float]:
    found, labels = np.argmax(prediction.predictions[:, :-1], -1), prediction.label_ids[:, 1:]
    return {"accuracy": float((found == labels)[labels != -100].mean()), "rows": float(len(labels))}


def arguments(folder: str, **others: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_steps": 5, "learning_rate": 1e-2, "warmup_steps": 2,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 2, "report_to": [], "disable_tqdm": True, "seed": 5,
        "include_num_input_tokens_seen": "all", "lr_scheduler_type": "cosine", "load_best_model_at_end": False,
        "metric_for_best_model": "accuracy",
    }  # fmt: skip
    return TrainingArguments(**{**chosen, **others})


def trainer(own: Model, folder: str, num_rows: int = 27, **others: Any) -> Any:
    """The same class on one process, where the model is not compiled."""
    logging.disable_progress_bar()
    made = Trainer(
        model=own, args=arguments(folder, **others), train_dataset=rows(num_rows, 0), eval_dataset=rows(11, 1),
        compute_metrics=accuracy,
    )  # fmt: skip
    made.remove_callback(transformers.PrinterCallback)
    return made


def outcome(made: Any) -> dict[str, Any]:
    """What a run leaves: what it logged, the parameters, and what it counted."""
    timing = ("runtime", "_per_second", "preparation_time")
    history = [log for log in made.state.log_history if "train_loss" not in log]  # of the steps of one call
    logs = [{k: v for k, v in log.items() if not k.endswith(timing)} for log in history]
    state = {name: script.whole(x).detach().cpu().clone() for name, x in made.model.named_parameters()}
    return {"logs": logs, "parameters": state, "flos": made.state.total_flos}


def one(dropout: float = 0.0) -> Model:
    as_under_torchrun(is_one=True)
    return model(dropout)


def compiled(sizes: dict[str, int], strategy: Any, dropout: float = 0.0) -> Model:
    as_under_torchrun()
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return autopar.compile(model(dropout), mesh, strategy=strategy)


def run(make: Callable[[], Model], folder: str) -> dict[str, Any]:
    """Five steps over an epoch and a half, whose last batches are not full; then what is made of the result."""
    made = trainer(make(), folder)
    loss = made.train().training_loss
    found = {"run": outcome(made), "loss": loss, "evaluated": made.evaluate(rows(7, 2))["eval_loss"]}
    prediction = made.predict(rows(3, 4))
    found["predicted"] = torch.from_numpy(prediction.predictions)
    made.save_model(f"{folder}/end")
    return found


def continued(make: Callable[[], Model], folder: str, source: str) -> dict[str, Any]:
    """A run that goes on from another's second step."""
    made = trainer(make(), folder)
    made.train(resume_from_checkpoint=f"{source}/checkpoint-2")
    return outcome(made)


def best(make: Callable[[], Model], folder: str) -> dict[str, Any]:
    """A run that ends with the parameters of its worst evaluation, which is not the last."""
    made = trainer(
        make(), folder, load_best_model_at_end=True, greater_is_better=False, eval_steps=1, save_steps=1, max_steps=3,
        warmup_steps=0, save_total_limit=1,
    )  # fmt: skip
    made.train()
    assert made.state.best_global_step != 3
    return {**outcome(made), "evaluated": made.evaluate()["eval_loss"]}


def plain_run(make: Callable[[], Model], folder: str) -> dict[str, Any]:
    """What a script of one process makes of the checkpoint of a mesh."""
    return continued(make, f"{folder}/plain", folder)


def looped(make: Callable[[], Model], folder: str) -> dict[str, Any]:
    """A loop of one's own with accelerate: four steps, of which the last two also from what was saved."""
    found = []
    for begin in (0, 2):
        AcceleratorState._reset_state(reset_partial_state=True)
        own = make()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = DataLoader(rows(15, 0), batch_size=2)  # type: ignore[arg-type]
        own, optimizer, loader, schedule = accelerator.prepare(own, optimizer, loader, schedule)
        if begin:
            accelerator.load_state(f"{folder}/state")
        losses, norms, seen = [], [], []
        for number, batch in enumerate(loader):
            if number < 2 * begin or number == 7:  # the last is not full, and the mesh does not divide it
                continue
            with accelerator.accumulate(own):
                output = own(**batch)
                accelerator.backward(output.loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(own.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(output.loss.item())
            seen.append(accelerator.gather_for_metrics(batch["labels"]).clone())
            if number == 3 and not begin:
                accelerator.save_state(f"{folder}/state")
        state = {name: script.whole(x).detach().clone() for name, x in own.named_parameters()}
        rates = schedule.get_last_lr()
        found.append({"losses": losses, "norms": norms, "rows": torch.cat(seen), "state": state, "rates": rates})
    return {"whole": found[0], "continued": found[1]}


def of_one(folder: str) -> dict[str, Any]:
    return {"run": run(one, folder), "best": best(one, f"{folder}/best"), "looped": looped(one, f"{folder}/loop")}


def of_ranks(folder: str, sizes: dict[str, int], strategy: Any, is_whole: bool) -> dict[str, Any]:
    """is_whole: also what is told, and what goes on from checkpoints."""
    make = partial(compiled, sizes, strategy)
    found = {"run": run(make, folder)}
    if is_whole:
        found["continued"] = continued(make, f"{folder}/on", folder)
        found["best"] = best(make, f"{folder}/best")
    return found


def looped_on_ranks(folder: str) -> dict[str, Any]:
    return looped(partial(compiled, {"dp": 2}, "zero3"), folder)


def with_dropout(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run with random numbers, and one that goes on from its second step."""
    make = partial(compiled, {"dp": 2}, "zero2", 0.1)
    made = trainer(make(), folder)
    made.train()
    return outcome(made), continued(make, f"{folder}/on", folder)


def told(folder: str) -> list[str]:
    """What is said of arguments that do not go with a compiled model."""
    own = compiled({"dp": 2}, "zero3")
    found = [
        training.message(lambda: trainer(own, folder, save_on_each_node=True)),
        training.message(lambda: trainer(own, folder, train_sampling_strategy="batch_rebalance")),
    ]
    as_under_torchrun(is_one=True)
    found.append(training.message(lambda: trainer(own, folder)))
    AcceleratorState._reset_state(reset_partial_state=True)
    found.append(training.message(lambda: Accelerator(cpu=True).prepare(own)))
    AcceleratorState._reset_state(reset_partial_state=True)
    as_under_torchrun()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    own = autopar.compile(model(), mesh, strategy={"pp": "pipeline"})
    return [*found, training.message(lambda: trainer(own, folder))]


def summed_up() -> tuple[int, int, bool]:
    """How many predictions and labels of ten rows metrics get of a Seq2SeqTrainer that generates, four at a time, and
    whether the predictions are those of one process.
    """
    import transformers as hf

    from autopar.integrations.transformers import ForCompiled

    class Compiled(ForCompiled, hf.Seq2SeqTrainer):
        pass

    config = hf.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    as_under_torchrun()
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    plain = hf.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(2, 64, (10, 8), generator=torch.Generator().manual_seed(0))
    examples: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[:5]} for row in ids]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    expected = plain.generate(ids, attention_mask=torch.ones_like(ids), max_length=6)
    compiled: Any = autopar.compile(plain, mesh, strategy="zero3")
    with tempfile.TemporaryDirectory() as folder:
        args = hf.Seq2SeqTrainingArguments(
            folder, per_device_eval_batch_size=4, predict_with_generate=True, use_cpu=True, report_to=[]
        )
        found = Compiled(model=compiled, args=args).predict(examples, max_length=6)
    tokens = torch.from_numpy(np.asarray(found.predictions))
    same = torch.equal(tokens[:, : expected.shape[1]], expected[: len(tokens)]) if len(tokens) == 10 else False
    return len(tokens), len(np.asarray(found.label_ids)), same
