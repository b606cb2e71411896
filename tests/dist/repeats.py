"""What runs on each process of test_repeats.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import repeats
from autopar.runtime.graphs import Work
from autopar.runtime.in_place import InPlace
from tests.dist import generation


def _compiled(model: Any, strategy: str = "tensor", way: str = "plain") -> Any:
    mesh, backend = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",)), BACKENDS.get(way, False)
    return autopar.compile(copy.deepcopy(model), mesh, strategy=strategy, compile_regions=backend)


def on_the_same_memory(rehearse: Work, work: Work) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """As a CUDA graph does it: everything is computed anew into the memory of the first time."""
    rehearse()
    values = work()

    def replay() -> None:
        for kept, new in zip(values, work(), strict=True):
            if kept is not new:
                kept.copy_(new)

    return values, replay


def no_graph(rehearse: Work, work: Work) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """As where something waits for the device."""
    rehearse()
    raise RuntimeError("it waits for the device")


BACKENDS: dict[str, bool | str] = {"compiled": "aot_eager", "inductor": True}
"""Ways in which regions are compiled."""
WAYS = {"graphs": on_the_same_memory, "none": no_graph}


@contextmanager
def as_graphs(way: str) -> Iterator[None]:
    """Inside, programs that may be CUDA graphs are something like it on a CPU."""
    before = repeats.may_be_graph, repeats.cuda_graph
    repeats.may_be_graph = lambda comm: way in ("graphs", "none")
    repeats.cuda_graph = WAYS.get(way, no_graph)
    try:
        yield
    finally:
        repeats.may_be_graph, repeats.cuda_graph = before


def _num_runs(compiled: Any) -> int:
    kept = compiled.autopar.repeats._kept.values()
    return sum(each._num_runs for each in kept)


def tokens(name: str, way: str) -> tuple[dict[str, list[list[int]]], int]:
    """The tokens of every case, twice the same; how many calls were repeats."""
    with as_graphs(way):
        model, prompt = generation.model_and_prompt(name)
        compiled = _compiled(model, way=way)
        found = generation.generated(compiled, prompt)
        assert generation.generated(compiled, prompt) == found
        return found, _num_runs(compiled)


def tokens_of_pieces(way: str) -> tuple[dict[str, list[list[int]]], list[tuple[int, int]]]:
    """The tokens of every case, twice the same; of each program whose calls are known, how many compiled pieces it is,
    and how many sends.
    """
    model, prompt = generation.model_and_prompt("qwen2")
    compiled = _compiled(model, way=way)
    found = generation.generated(compiled, prompt)
    assert generation.generated(compiled, prompt) == found
    own = [each._in_place for each in compiled.autopar.repeats._kept.values()]
    texts = [each._replay.text.splitlines() for each in own if each is not None and each._replay.text]
    calls = [[line for line in text if line.startswith("    ") and "(" in line] for text in texts]
    calls = [[line for line in text if not line.strip().startswith(("at(", "return", "del"))] for text in calls]
    return found, [(len(text) - (sent := sum("all_" in x for x in text)), sent) for text in calls]


def kept_by_a_script(way: str) -> list[bool]:
    """What a script keeps of one run is as it was after others: its cache, logits of every token."""
    with as_graphs(way):
        return _kept_by_a_script(way)


def written_in_place(way: str) -> tuple[list[int], bool]:
    """How many of the calls in each of two runs wrote their caches in place, and whether a run is over when it is: a
    cache that is taken up again stays as it was, and gives the same twice.
    """
    model, prompt = generation.model_and_prompt("qwen2")
    compiled, plain = _compiled(model, way=way), InPlace.__call__
    counts: list[int] = []

    def counted(self: InPlace, *given: Any, **named: Any) -> Sequence[Tensor]:
        counts[-1] += 1
        return plain(self, *given, **named)

    InPlace.__call__ = counted  # type: ignore[method-assign]
    said: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "max_cache_len": 40}
    try:
        counts.append(0)
        compiled.generate(**prompt, **said)
        counts.append(0)
        first = compiled.generate(**prompt, **said, return_dict_in_generate=True)
        assert compiled.autopar.caches.generating() is None
        counts.append(0)
        before = [x.clone() for x in _whole(first.past_key_values)]
        longer = torch.cat([first.sequences, prompt["input_ids"]], 1)
        begun = first.past_key_values
        found = [compiled.generate(longer, past_key_values=copy.deepcopy(begun), **said) for _ in range(4)]
    finally:
        InPlace.__call__ = plain  # type: ignore[method-assign]
    same = map(torch.equal, before, _whole(first.past_key_values))
    return counts[:2], all(torch.equal(found[0], each) for each in found) and all(same)


def _whole(cache: Any) -> list[Tensor]:
    return [torch.as_tensor(x.full_tensor() if hasattr(x, "full_tensor") else x) for x in cache.states()]


def _kept_by_a_script(way: str) -> list[bool]:
    model, prompt = generation.model_and_prompt("qwen2")
    compiled = _compiled(model, way=way)
    said: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        compiled.generate(**prompt, **said)
    first = compiled.generate(**prompt, **said, output_logits=True, return_dict_in_generate=True)
    plain = model.generate(**prompt, **said, output_logits=True, return_dict_in_generate=True)
    # Had a later token overwritten them, they would be those of the last. Sums of 32 terms, rounded to float32.
    pairs = zip(first.logits, plain.logits, strict=True)
    logits = [float((x - y).abs().max()) <= 32 * torch.finfo(x.dtype).eps * float(y.abs().max()) for x, y in pairs]
    before = [x.clone() for x in _whole(first.past_key_values)]
    other = {**prompt, "input_ids": (prompt["input_ids"] * 7 + 3) % 90 + 5}
    mine, theirs = (each.generate(**other, **said).tolist() for each in (compiled, model))
    same = [torch.equal(x, y) for x, y in zip(before, _whole(first.past_key_values), strict=True)]
    return [*logits, *same, mine == theirs]


def changed_between_calls() -> dict[str, float]:
    """The largest difference of logits from eager's, after each of the changes that a script makes between calls."""
    model, _ = generation.model_and_prompt("qwen2")
    model = model.double()
    compiled = _compiled(model, "zero3")
    ids = torch.randint(5, 96, (4, 6), generator=torch.Generator().manual_seed(3))
    found: dict[str, float] = {}

    def compare(name: str) -> None:
        with torch.no_grad():
            mine, theirs = compiled(input_ids=ids, use_cache=False), model(input_ids=ids, use_cache=False)
        found[name] = float((mine.logits[:] - theirs.logits).abs().max())

    for number in range(3):
        compare(f"call {number}")
    for each in (model, compiled):
        each.model.layers[0].self_attn.scaling = 0.5
    compare("a number")
    compare("a number, again")
    for each in (model, compiled):
        each.model.layers[0].self_attn.scaling = 8**-0.5
    for each in (model, compiled):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(input_ids=ids, use_cache=False).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(compiled.state_dict())  # rounding apart
    compare("a step")
    compare("a step, again")
    state = {name: value * 1.5 for name, value in model.state_dict().items()}
    for each in (model, compiled):
        each.load_state_dict(state)
    compare("other weights")
    ids = ids.flip(1)
    compare("other tokens")
    return found


def labels_of_their_own() -> list[float]:
    """Differences of losses from eager's: of labels that are the tokens themselves, and then of others."""
    model, _ = generation.model_and_prompt("qwen2")
    compiled = _compiled(model, "ddp")
    ids = torch.randint(5, 96, (4, 6), generator=torch.Generator().manual_seed(3))
    found = []
    with torch.no_grad():
        for labels in (ids, ids, ids.flip(0), ids.masked_fill(ids < 40, -100), ids):
            mine, theirs = (each(input_ids=ids, labels=labels, use_cache=False).loss for each in (compiled, model))
            found.append(abs(float(mine) - float(theirs)) / float(theirs))
    assert _num_runs(compiled) >= 4
    return found


def modes() -> list[bool]:
    """Whether evaluations are eager's, and whether one in training mode, with dropout, is another; and back."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=96, resid_pdrop=0.5)
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    compiled = _compiled(model, "ddp")
    ids = torch.randint(5, 96, (4, 6), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        found = [compiled.train(mode)(input_ids=ids, use_cache=False).logits[:] for mode in (False, False, True, False)]
    scale = float(want.abs().max())
    return [float((each - want).abs().max()) < 1e-2 * scale for each in found]


def evaluated_first() -> list[float]:
    """Differences of losses from eager's, where all begins with an evaluation under `torch.inference_mode`, and the
    model is trained then.
    """
    model, _ = generation.model_and_prompt("qwen2")
    compiled = _compiled(model, "zero3")
    ids = torch.randint(5, 96, (4, 6), generator=torch.Generator().manual_seed(3))
    losses: list[list[float]] = []
    for each in (model, compiled):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses.append([])
        for _ in range(2):
            with torch.inference_mode():
                found = [each(input_ids=ids + 1, labels=ids, use_cache=False) for _ in range(3)][-1]
                losses[-1] += [float(found.loss), float(found.logits.square().mean())]
            each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)]


def differing_tokens() -> str:
    """What the ranks are told where, at a repeat, one has other tokens."""
    model, _ = generation.model_and_prompt("qwen2")
    compiled = _compiled(model)
    ids = torch.randint(5, 96, (4, 6), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for _ in range(3):
            compiled(input_ids=ids, use_cache=False)
        try:
            compiled(input_ids=ids + dist.get_rank(), use_cache=False)
        except autopar.AutoparError as error:
            return str(error)
    return ""
