"""Requests that come and go: who is served when, and what is written into whose row."""

from __future__ import annotations

import functools
import logging.handlers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.base.huggingface import serving
from autopar.base.huggingface.masks import SPELLED_OUT
from autopar.base.huggingface.states import Layout, Part, StateCache
from autopar.runtime.serving import rows
from autopar.runtime.serving.schedule import Piece, Schedule, Work


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), max_size=14),
    lanes=st.integers(1, 3),
    per_lane=st.integers(1, 3),
    chunk=st.integers(1, 6),
)
def test_first_come_first_served(sizes: list[tuple[int, int]], lanes: int, per_lane: int, chunk: int) -> None:
    """Breaks if a request overtakes another or never begins, if two share a slot or a column, if a token of a prompt is
    left out or read twice, or if a prompt is on other ranks than its slot.
    """
    works = [Work(number, list(range(prompt)), limit) for number, (prompt, limit) in enumerate(sizes)]
    room = (-(-9 // chunk) + 1) * chunk
    schedule = Schedule(iter(works), lanes * per_lane, lanes, chunk, room)
    begun: list[int] = []
    live: dict[int, list[Any]] = {}
    columns: dict[tuple[int, int], Work] = {}
    ended: list[int] = []
    for _ in range(1000):
        if schedule.is_done() and not live:
            break
        if schedule.is_fresh:
            columns = {}
        pieces = schedule.next_chunk()
        first = schedule.cursor - chunk
        for piece in pieces:
            work = piece.work
            begun += [work.number] if not piece.start else []
            assert piece.lane == work.slot // per_lane
            assert first + piece.at == work.begin + piece.start
            assert 0 <= piece.at <= piece.at + piece.count <= chunk
            for column in range(work.begin + piece.start, work.begin + piece.start + piece.count):
                assert (piece.lane, column) not in columns
                assert column < room
                columns[piece.lane, column] = work
            if piece.ends:
                assert work.slot not in live
                live[work.slot] = [work, work.limit]
        for slot, entry in list(live.items()):
            entry[1] -= 1
            if not entry[1]:
                ended.append(entry[0].number)
                del live[slot]
                schedule.give_back(entry[0])
    assert begun == list(range(len(works)))
    assert sorted(ended) == begun
    assert all(work.read == len(work.prompt) for work in works)


def test_prompts_stand_behind_each_other() -> None:
    """Breaks if a prompt waits for the next chunk though there is room in this one."""
    works = [Work(number, [0] * size, 1) for number, size in enumerate((5, 6, 2))]
    schedule = Schedule(iter(works), 4, 1, 8, 16)
    assert schedule.next_chunk() == [Piece(works[0], 0, 0, 0, 5), Piece(works[1], 0, 5, 0, 3)]
    assert schedule.next_chunk() == [Piece(works[1], 0, 0, 3, 3), Piece(works[2], 0, 3, 0, 2)]
    assert schedule.is_done()
    assert schedule.next_chunk() == []


def test_what_is_dropped_makes_room() -> None:
    """Breaks if a request that is cancelled keeps its slot, is read on, or comes back after it waited."""
    works = [Work(number, [0] * size, 1) for number, size in enumerate((9, 3, 2, 1))]
    schedule = Schedule(iter(works), 2, 2, 4, 12)
    assert [piece.work.number for piece in schedule.next_chunk()] == [0, 1]
    waits = schedule._peek()
    assert waits is works[2]
    schedule.drop(waits)
    schedule.drop(works[0])
    assert schedule.is_fresh
    assert schedule.next_chunk() == [Piece(works[3], 0, 0, 0, 1)]
    assert works[3].slot == works[0].slot and works[2].slot == -1


def _cache(num_rows: int, length: int) -> StateCache:
    layouts = [Layout("attention"), Layout("hybrid", (Part(3, False, True),))]
    keys = (num_rows, 2, length, 4)
    states = [torch.rand(shape) for shape in (keys, keys, (num_rows, 5, 3), keys, keys)]
    return StateCache(layouts, [*states[:2], torch.tensor(length - 1), *states[2:], torch.tensor(length - 1)])


def test_a_prompt_becomes_a_row() -> None:
    """Breaks if keys come from another row or column, go to another one, or other rows change."""
    cache, source = _cache(4, 9), _cache(2, 6)
    before = [x.clone() for x in cache.states()]
    found = rows.put(cache, source, [rows.Move(row=1, begin=2, count=3, to_row=2, at=4)]).states()
    for was, x, given_x in zip(before, found, source.states(), strict=True):
        if not was.dim():
            assert torch.equal(x, was)
            continue
        for row in (0, 1, 3):
            assert torch.equal(x[row], was[row])
        if was.dim() == 3:
            assert torch.equal(x[2], given_x[1])
            continue
        assert torch.equal(x[2][:, 4:7], given_x[1][:, 2:5])
        assert torch.equal(x[2][:, :4], was[2][:, :4])
        assert torch.equal(x[2][:, 7:], was[2][:, 7:])


@pytest.mark.parametrize("by", [-3, 2])
def test_all_rows_move_along(by: int) -> None:
    """Breaks if a column is lost that a row needs, or the next token is not written behind it."""
    cache = _cache(2, 9)
    found = rows.moved(cache, by)
    for was, x in zip(cache.states(), found.states(), strict=True):
        if not was.dim():
            assert x == 8 + by
        elif was.dim() == 3:
            assert torch.equal(x, was)
        else:
            kept = slice(3, 9) if by < 0 else slice(0, 7)
            assert torch.equal(x[:, :, slice(0, 6) if by < 0 else slice(2, 9)], was[:, :, kept])


@pytest.mark.parametrize("is_float", [False, True])
def test_a_document_sees_itself(is_float: bool) -> None:
    """Breaks if a prompt sees the one before it in its row, or what stood there before, or if what is nobody's sees
    nothing, which is not a number.
    """
    documents = torch.tensor([[7, 7, 8, 8, -2, -1]])
    causal = torch.arange(6)[None, :] <= torch.arange(2, 5)[:, None]
    mask = causal[None, None].expand(1, 1, 3, 6)
    given_mask = torch.zeros(1, 1, 3, 6).masked_fill(~mask, torch.finfo(torch.float32).min) if is_float else mask
    found = serving.within_documents({"attention_mask": {"full_attention": given_mask}}, documents, 2)
    seen = found["attention_mask"]["full_attention"]
    seen = (seen == 0) if is_float else seen
    assert seen[0, 0].long().tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]]


def _model(**options: Any) -> Any:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


def test_masks_are_spelled_out_where_a_cache_asks_for_them() -> None:
    """Breaks if the first chunk of a prompt has no mask, or a mask of something else than the chunks behind it have."""
    from autopar.base.huggingface import caches
    from autopar.base.huggingface.masks_of_generate import spelled_out

    model = _model()
    create: Any = functools.partial(spelled_out(type(model)), model)
    cache = caches.new_cache(model, 1, 5, torch.device("cpu"))
    given_now: dict[str, Any] = {
        "config": model.config, "inputs_embeds": torch.empty(1, 3, 0), "attention_mask": torch.ones(1, 3),
        "past_key_values": cache,
    }  # fmt: skip
    assert create(**given_now) is None
    setattr(cache, SPELLED_OUT, True)
    assert create(**given_now)[0, 0].long().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]


def test_nothing_is_said_of_models_that_are_asked_for_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a small model that is not the caller's shows its configuration in the caller's log."""
    import transformers

    from autopar.base.huggingface.masks_of_generate import spelled_out

    logger, model = transformers.logging.get_logger(), _model()
    create: Any = functools.partial(spelled_out(type(model)), model)
    heard = logging.handlers.BufferingHandler(100)
    monkeypatch.setattr(logger, "handlers", [heard])
    monkeypatch.setattr(logger, "level", logging.INFO)
    create(config=model.config, inputs_embeds=torch.empty(1, 3, 0), attention_mask=None, past_key_values=None)
    assert not heard.buffer


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_a_token_is_handed_the_mask_that_transformers_makes(kind: str) -> None:
    """Breaks if a token sees padding, what is not written yet, or more than its window; or if its mask is made the long
    way where all layers see everything before it.
    """
    import transformers

    from autopar.base.huggingface import caches
    from autopar.base.huggingface.masks import TOKENS
    from autopar.base.huggingface.masks_of_generate import spelled_out

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    make: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)),
        "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=3)),
    }
    model = make[kind]()
    create: Any = functools.partial(spelled_out(type(model)), model)
    usual: Any = transformers.masking_utils.create_masks_for_generate
    cache: Any = caches.new_cache(model, 2, 9, torch.device("cpu"))
    cache = caches.advanced(cache, 4)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for _ in range(4):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], -1)
        given = {"config": model.config, "inputs_embeds": torch.empty(2, 1, 0), "attention_mask": mask}
        found, want = create(**given, past_key_values=cache), usual(**given, past_key_values=cache)
        pairs = zip(found.values(), want.values(), strict=True) if isinstance(want, dict) else [(found, want)]
        assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
        assert vars(cache)[TOKENS].is_short is (kind != "mistral")
        cache = caches.advanced(cache, 1)
    other = caches.advanced(caches.new_cache(model, 2, 12, torch.device("cpu")), mask.shape[1])
    setattr(other, TOKENS, vars(cache)[TOKENS])  # of one that had another length
    given["attention_mask"] = torch.ones(2, mask.shape[1] + 1)
    found = create(**given, past_key_values=other)
    assert next(iter(found.values())).shape[-1] == 12 if isinstance(found, dict) else found.shape[-1] == 12


def test_a_short_way_to_masks_is_held_against_the_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if masks of tokens are made the short way for a model of which transformers makes others."""
    import transformers

    from autopar.base.huggingface import caches, masks_of_generate
    from autopar.base.huggingface.masks import TOKENS

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 3}
    model: Any = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))
    cache = caches.advanced(caches.new_cache(model, 1, 9, torch.device("cpu")), 4)
    given = {"config": model.config, "inputs_embeds": torch.empty(1, 1, 0), "attention_mask": torch.ones(1, 5)}
    monkeypatch.setattr(masks_of_generate, "_sees_all", lambda *_: True)
    found = masks_of_generate.spelled_out(type(model))(model, **given, past_key_values=cache)
    assert found.long().flatten().tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert not vars(cache)[TOKENS].is_short


def test_models_that_count_positions_are_handed_a_mask_of_them() -> None:
    """Breaks if a model that makes its biases of a mask [batch, length] is handed one of queries and keys, which it
    cannot read, or one that marks what is not written yet; or if others are handed such a mask.
    """
    import transformers

    from autopar.base.huggingface import caches
    from autopar.base.huggingface.masks_of_generate import spelled_out

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    for alibi, options in ((True, {"multi_query": False}), (True, {"new_decoder_architecture": True}), (False, {})):
        model: Any = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=alibi, **options))
        create: Any = functools.partial(spelled_out(type(model)), model, model.config, torch.empty(2, 1, 0))
        cache = caches.new_cache(model, 2, 5, torch.device("cpu"))
        cache.advance(2)
        padded = create(torch.tensor([[0, 1, 1], [1, 1, 1]]), cache)
        assert padded.tolist() == [[0, 1, 1, 0, 0], [1, 1, 1, 0, 0]] if alibi else padded.dim() == 4
        assert create(None, cache).tolist() == [[1, 1, 1, 0, 0]] * 2 if alibi else create(None, cache).dim() == 4


@pytest.mark.parametrize("is_static", [False, True])
def test_masks_of_a_models_own_stay(is_static: bool) -> None:
    """Breaks if a model that makes its masks itself, as a method or a static one (Bloom, Gemma), cannot generate."""
    from autopar.base.huggingface.masks_of_generate import spelled_out

    class Static:
        @staticmethod
        def create_masks_for_generate(
            config: Any, inputs_embeds: Any, attention_mask: Any, past_key_values: Any
        ) -> Any:
            return attention_mask

    class Method:
        def create_masks_for_generate(
            self, config: Any, inputs_embeds: Any, attention_mask: Any, past_key_values: Any
        ) -> Any:
            return attention_mask

    kind: Any = Static if is_static else Method
    assert spelled_out(kind)(kind(), None, None, "its own", None) == "its own"


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.4, "top_k": 7},
        {"do_sample": True, "temperature": 2.0, "top_p": 0.6},
        {"do_sample": False},
    ],
)
@pytest.mark.parametrize("penalty", [None, 1.7])
def test_tokens_are_those_of_generate_alone(options: dict[str, Any], penalty: float | None) -> None:
    """Breaks if a request draws other tokens than its own `generate()` with its seed, or leaves out an option, the
    model's own, or what its rules say of tokens that are there already.
    """
    from autopar.base.huggingface.sampling import Chooser

    torch.manual_seed(0)
    model = _model(bos_token_id=1, eos_token_id=None, pad_token_id=0).eval()
    with torch.no_grad():
        model.lm_head.weight *= 40
    model.generation_config.update(repetition_penalty=penalty, top_k=9, eos_token_id=None)
    prompt, tokens = [3, 5, 3, 11], list[int]()
    with torch.no_grad():
        torch.manual_seed(7)
        ids = torch.tensor([prompt])
        want = model.generate(ids, max_new_tokens=12, pad_token_id=0, attention_mask=torch.ones_like(ids), **options)
        chooser = Chooser(model, prompt, 12, options, 7, torch.device("cpu"))
        state = torch.get_rng_state()
        for _ in range(12):
            tokens.append(chooser.choose(model(torch.tensor([[*prompt, *tokens]])).logits[0, -1], tokens))
    assert tokens == want[0, len(prompt) :].tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert chooser.has_rules == (options["do_sample"] or penalty is not None)


def test_what_a_request_says_of_draws_is_checked() -> None:
    """Breaks if options of draws are left out without a word, or nonsense ends in a traceback of transformers."""
    from autopar.base.huggingface.sampling import Chooser
    from autopar.runtime.serving.serve import Asked, Request, _work

    asked = Asked(1, 4, None, None, None)
    with pytest.raises(
        AutoparError, match=r"request 3 says how tokens are drawn(.|\n)*top_k, seed(.|\n)*do_sample=True"
    ):
        _work(3, Request([1, 2], 4, top_k=5, seed=1), asked, 8)
    with pytest.raises(AutoparError, match="cannot be answered so"):
        Chooser(_model(), [1], 4, {"do_sample": True, "temperature": -1.0}, 0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([1, 8], "does not know(.|\n)*8, of 8"), ([-1], "does not know"), ([1.5], "is no prompt"),
        ("hi", "is no prompt"), (torch.tensor([[1, 2]]), "is no prompt"), ([], "nothing to do"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_prompt_is_told(prompt: Any, says: str) -> None:
    """Breaks if a token that no rank's part of a table has gets zeros for a vector, or half of one is cut off."""
    from autopar.runtime.serving.serve import Asked, _work

    asked = Asked(1, 4, None, None, None)
    with pytest.raises(AutoparError, match=f"request 3(.|\n)*{says}"):
        _work(3, prompt, asked, 8)
    assert _work(3, torch.tensor([0, 7]), asked, 8).prompt == [0, 7]


def test_what_cannot_be_served_is_told() -> None:
    """Breaks if a model whose rows depend on each other serves requests with other tokens than alone."""
    serving.check_serves(_model())
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(AutoparError, match="follows the longest sequence"):
        serving.check_serves(_model(rope_parameters=dynamic))
    with pytest.raises(AutoparError, match="cut by columns"):
        serving.check_serves(_model(attention_chunk_size=4))
