"""What runs on each process of test_generation.py."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.base.torch_compat.distributed import local_tensor
from tests.dist.architectures import GAIN, model_and_prompt

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 2},
    "sampled": {"do_sample": True, "temperature": 1.0},
    "longer": {"do_sample": False, "max_new_tokens": 9},
}


def generated(model: Any, prompt: dict[str, Tensor]) -> dict[str, list[list[int]]]:
    """The tokens of every case."""
    found = {}
    for name, options in CASES.items():
        torch.manual_seed(7)
        found[name] = model.generate(**prompt, **{"max_new_tokens": 5, "pad_token_id": 0, **options}).tolist()
    return found


def of_odd_prompts(name: str, strategy: str | None) -> list[Any]:
    """The tokens of three prompts, of one, and of two; beams. strategy: None: on one process."""
    model, prompt = model_and_prompt(name)
    if strategy is not None:
        model = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), strategy=strategy)
    found = []
    for rows, beams in ((3, 1), (1, 1), (1, 3), (2, 1)):
        own = {key: value[:rows] for key, value in prompt.items()}
        found.append(model.generate(**own, max_new_tokens=4, num_beams=beams, pad_token_id=0).tolist())
    return found


def on_ranks(name: str, sizes: dict[str, int], strategy: Any) -> dict[str, list[list[int]]]:
    """The tokens of every case, on a mesh."""
    model, prompt = model_and_prompt(name, GAIN)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return generated(autopar.compile(model, mesh, strategy=strategy), prompt)


def without_a_cache(axis: str | None) -> list[list[int]]:
    """Of a padded prompt, each token by reading all before it. axis: of two ranks; None: one process."""
    model, prompt = model_and_prompt("qwen2")
    if axis is not None:
        model = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)))
    found: list[list[int]] = model.generate(**prompt, max_new_tokens=3, pad_token_id=0, use_cache=False).tolist()
    return found


def with_drafts(strategy: str | None) -> list[list[list[int]]]:
    """The tokens for one prompt, of drafts that repeat it and of another model's; greedy and drawn. None: one process,
    the greedy ones without drafts.
    """
    model, prompt = model_and_prompt("qwen2")
    torch.manual_seed(3)
    other = copy.deepcopy(model)
    with torch.no_grad():  # so near that some of its drafts are taken and some are not
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=2e-3)
    if strategy is not None:
        model = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), strategy=strategy)
    ids = prompt["input_ids"][1:2].repeat(1, 2)
    drafts: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 3}, {"assistant_model": other}]
    found = []
    for draft in drafts:
        for draws in (False, True):
            torch.manual_seed(7)
            options = draft if strategy is not None or draws else {}
            tokens = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0, do_sample=draws,
                **options,
            )  # fmt: skip
            found.append(tokens.tolist())
    return found


def habits(strategy: str | None) -> dict[str, list[list[int]]]:
    """Tokens of calls as other people's scripts make them. None: on one process."""
    model, prompt = model_and_prompt("qwen2")
    looking, images = _with_images()
    embedded = model.get_input_embeddings()(prompt["input_ids"]).detach()
    if strategy is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        model = autopar.compile(model, mesh, strategy=strategy)
        looking = autopar.compile(looking, mesh, strategy=strategy)
    fixed: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    found = {
        "images": looking.generate(**images, **fixed),
        "embedded": model.generate(inputs_embeds=embedded, attention_mask=prompt["attention_mask"], **fixed),
        "rules": model.generate(**prompt, **fixed, repetition_penalty=1.3, no_repeat_ngram_size=2, eos_token_id=[5, 6]),
    }
    first = model.generate(**prompt, **fixed, max_cache_len=24, return_dict_in_generate=True)
    asked = torch.cat([first.sequences, torch.full((4, 2), 9)], 1)
    mask = torch.cat([prompt["attention_mask"], torch.ones(4, asked.shape[1] - 7, dtype=torch.long)], 1)
    kept = {} if strategy is None else {"past_key_values": first.past_key_values}
    found["goes on"] = model.generate(input_ids=asked, attention_mask=mask, **kept, **fixed)
    return {name: tokens.tolist() for name, tokens in found.items()}


def _with_images() -> tuple[Any, dict[str, Tensor]]:
    """A model that looks at images, and a prompt with one in each row."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=96)
    vision = transformers.CLIPVisionConfig(**sizes, num_attention_heads=4, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=95, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[:, 1:5] = 95  # what stands for the patches of an image
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 16, 16)}


def stored(strategy: str | None, cache: str) -> dict[str, list[list[int]]]:
    """The tokens of every case where keys and values are stored as codes, in float64. strategy None: on one process,
    with a cache of transformers' that rounds.
    """
    from tests.unit.test_stored_caches import rounded_cache

    model, prompt = model_and_prompt("qwen2")
    model = model.double()
    if strategy is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        model = autopar.compile(model, mesh, strategy=strategy, cache=cache)
    found = {}
    for name, options in CASES.items():
        torch.manual_seed(7)
        kept = {} if strategy is not None else {"past_key_values": rounded_cache(model, cache)}
        given = {"max_new_tokens": 5, "pad_token_id": 0, **options, **kept}
        found[name] = model.generate(**prompt, **given).tolist()
    return found


def with_stored_weights(strategy: str | None, way: str) -> dict[str, list[list[int]]]:
    """The tokens of every case of a model whose weights are codes, and those of a forward by itself. strategy None: on
    one process, without autopar.
    """
    model, prompt = model_and_prompt("qwen2")
    model = autopar.store_weights(model.double(), way, group=8)
    if strategy is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp" if strategy == "pipeline" else "x",))
        model = autopar.compile(model, mesh, strategy=strategy)
    with torch.no_grad():
        alone = model(**prompt).logits.argmax(-1).tolist()
    return {**generated(model, prompt), "alone": alone}


def planned_before(
    strategy: str, sizes: Mapping[str, int] = MappingProxyType({"x": 2}), cache: str | None = None
) -> tuple[list[list[list[int]]], int, int, int]:
    """Tokens of three calls that were planned for, how many programs there are, and bytes of the cache: predicted of
    the rank that has most, and of the tensors here.
    """
    model, prompt = model_and_prompt("qwen2")
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    wanted = autopar.Generation(batch=4, prompt=7, new_tokens=12, padded=True, cache=cache)
    compiled: Any = autopar.compile(model, mesh, strategy=strategy, generate=wanted)
    tokens = [compiled.generate(**prompt, max_new_tokens=count, pad_token_id=0).tolist() for count in (3, 8, 12)]
    done = compiled.generate(**prompt, max_new_tokens=2, pad_token_id=0, return_dict_in_generate=True)
    states = done.past_key_values.states()
    pieces = [local_tensor(state) if isinstance(state, DTensor) else state for state in states]
    held = sum(piece.numel() * piece.element_size() for piece in pieces if not piece.is_meta)
    return tokens, len(compiled.autopar._programs), compiled.generation_plan.cache_bytes, held


def long_prompt(prompt: dict[str, Tensor], *, padded: bool) -> dict[str, Tensor]:
    """Prompts of 12 tokens."""
    found = {name: value.repeat(1, 2)[:, :12] for name, value in prompt.items()}
    return found if padded else {**found, "attention_mask": torch.ones_like(found["attention_mask"])}


def in_chunks(strategy: str) -> tuple[list[list[list[int]]], int, list[int], list[list[int]]]:
    """Tokens of calls whose prompt was planned in chunks, how many programs there are, how many tokens each call of
    forward was handed, and tokens of a call with other chunks, the last of which is shorter.
    """
    model, prompt = model_and_prompt("qwen2")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    prompt = long_prompt(prompt, padded=strategy == "tensor")
    wanted = autopar.Generation(batch=4, prompt=12, new_tokens=5, padded=strategy == "tensor", chunk=4)
    compiled: Any = autopar.compile(model, mesh, strategy=strategy, generate=wanted)
    fixed: dict[str, Any] = {"pad_token_id": 0, "do_sample": False}
    tokens = [compiled.generate(**prompt, max_new_tokens=count, **fixed).tolist() for count in (3, 5)]
    programs = len(compiled.autopar._programs)
    other = compiled.generate(**prompt, max_new_tokens=5, prefill_chunk_size=5, **fixed).tolist()
    counts: list[int] = []
    handle = compiled.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    compiled.generate(**prompt, max_new_tokens=3, **fixed)
    handle.remove()
    return tokens, programs, counts, other


def reused(strategy: str | None) -> tuple[dict[str, list[list[int]]], bool]:
    """Tokens of calls that go on from the caches of others, and whether these were left in pieces. None: on one
    process, whole prompts.
    """
    model, prompt = model_and_prompt("qwen2")
    if strategy is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        model = autopar.compile(model, mesh, strategy=strategy)
    fixed: dict[str, Any] = {"pad_token_id": 0, "do_sample": False}
    found: dict[str, Tensor] = {}
    caches: list[Any] = []

    def turn(ids: Tensor, mask: Tensor, cache: Any, count: int = 3, **options: Any) -> Any:
        kept = {} if strategy is None or cache is None else {"past_key_values": cache}
        done = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=count, return_dict_in_generate=True, **kept, **fixed,
            **options,
        )  # fmt: skip
        caches.append(done.past_key_values)
        return done

    # A conversation: every turn is longer than the cache that the one before left.
    ids, mask, cache = prompt["input_ids"], prompt["attention_mask"], None
    for number in range(2):
        done = turn(ids, mask, cache)
        found[f"turn {number}"], cache = done.sequences, done.past_key_values
        ids = torch.cat([done.sequences, torch.full((4, 2), 9 + number)], 1)
        mask = torch.cat([mask, torch.ones(4, ids.shape[1] - mask.shape[1], dtype=torch.long)], 1)
    # A prompt that others begin with: twice, for each of two beams, and then for some rows of them.
    begin = prompt["input_ids"][1:3]
    shared = turn(begin, torch.ones_like(begin), None, 2).past_key_values
    shared.crop(-1)  # the token that was made is not theirs
    ids = torch.cat([begin.repeat_interleave(2, 0), prompt["input_ids"][:, :3]], 1)
    found["shared"] = turn(ids, torch.ones_like(ids), shared).sequences
    found["beams"] = turn(ids[1:3], torch.ones_like(ids[1:3]), shared, num_beams=2).sequences
    chosen = turn(ids, torch.ones_like(ids), copy.deepcopy(shared)).past_key_values
    chosen.batch_select_indices(torch.tensor([3, 1]))
    ids = torch.cat([found["shared"][[3, 1]], torch.full((2, 2), 9)], 1)
    found["chosen"] = turn(ids, torch.ones_like(ids), chosen).sequences
    states = [state for cache in caches if strategy is not None for state in cache.states()]
    return {name: tokens.tolist() for name, tokens in found.items()}, all(
        getattr(state, "_whole", None) is None for state in states
    )


def in_turn(sizes: dict[str, int] | None, strategy: Any) -> tuple[list[float], list[list[list[int]]]]:
    """Losses and tokens of a model that is trained and generates in turn. sizes: of the mesh; None: on one process."""
    model, prompt = model_and_prompt("qwen2")
    batch = {"input_ids": prompt["input_ids"][1:].repeat(2, 1)[:4], "use_cache": False}
    batch["labels"] = batch["input_ids"]
    if sizes is not None:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = autopar.compile(model, mesh, strategy=strategy, example_inputs=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, tokens = [], []
    for _ in range(2):
        if sizes is None:
            loss = model(**batch).loss
            loss.backward()
        else:
            loss = model.train_step(**batch).loss
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens.append(model.generate(**prompt, max_new_tokens=4, pad_token_id=0, do_sample=False).tolist())
    return losses, tokens
