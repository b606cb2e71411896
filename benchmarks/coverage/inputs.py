"""Inputs and labels for a tiny model, from its forward's signature, its configuration and its task.

A name may have several shapes in which it is given; the combinations are tried in order until one runs.

Shape suffixes: B rows, S tokens, C channels, Y height, X width, T frames, M mel bins.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS, ANSWER = 8, 16, 8
MOST = 24
"""Combinations that are tried."""


@dataclass(frozen=True)
class Sizes:
    """What shapes are made of, read off the configuration and those inside it."""

    model: nn.Module
    task: str

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of the names that the configuration, or one inside it, has a value for."""
        for name in names:
            for config in configs(self.model):
                value = vars(config).get(name)
                if value is not None:
                    return value
        return default

    @property
    def text(self) -> Any:
        return self.model.config.get_text_config()  # type: ignore[operator,union-attr]

    @property
    def vocabulary(self) -> int:
        own = vars(self.text).get("vocab_size") or self.get("vocab_size", default=128)
        return own if isinstance(own, int) else 128

    @property
    def image(self) -> tuple[int, int]:
        size = self.get("image_size", default=64)
        pair = list(size) if isinstance(size, list | tuple) else [size, size]
        if isinstance(size, dict):
            pair = [size.get("height", 32), size.get("width", 32)]
        return (int(pair[-2]), int(pair[-1])) if len(pair) > 1 else (int(pair[0]), int(pair[0]))

    @property
    def labels(self) -> int:
        return int(getattr(self.model.config, "num_labels", 2) or 2)


def configs(model: nn.Module) -> Iterator[Any]:
    """The model's configuration and those inside it."""
    waiting = [model.config]
    while waiting:
        config = waiting.pop(0)
        yield config
        waiting += [
            value for value in vars(config).values() if hasattr(value, "to_dict") and hasattr(value, "model_type")
        ]


def batches(model: nn.Module, task: str) -> Iterator[dict[str, Any]]:
    """Keyword arguments of forward, the fullest first."""
    sizes = Sizes(model, task)
    accepted = inspect.signature(model.forward).parameters
    yield from itertools.islice(_combinations(sizes, accepted), MOST)


def _combinations(sizes: Sizes, accepted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    named = [each for each in accepted.values() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    required = [each.name for each in named if each.default is each.empty]
    main = getattr(sizes.model, "main_input_name", "input_ids")
    first = [main] if isinstance(main, str) else list(main)
    names = list(dict.fromkeys([*first, *required, *_wanted(sizes, accepted)]))
    names = [name for name in names if name in accepted]
    torch.manual_seed(0)
    for labels in _labels(sizes, accepted):
        for given in _given(sizes, names, accepted):
            batch = {**given, **labels}
            if "decoder_input_ids" in accepted and not labels and "input_ids" in given:
                batch.setdefault("decoder_input_ids", _ids(sizes, ANSWER))
            yield batch


def _wanted(sizes: Sizes, accepted: Mapping[str, Any]) -> list[str]:
    """Optional inputs that belong to the task."""
    found = [
        name
        for name in ("input_ids", "pixel_values", "pixel_values_videos")
        if sizes.task in PICTURES and name in accepted
    ]
    if "spatial_shapes" in accepted and "pixel_attention_mask" in accepted:
        found.append("pixel_attention_mask")
    if "image_grid_thw" in accepted and "pixel_values" in found:
        found.append("image_grid_thw")
        found += [name for name in ("image_merge_sizes",) if name in accepted]
        if "video_grid_thw" in accepted and "pixel_values_videos" in found:
            found.remove("pixel_values_videos")  # it would have a grid of its own
    if sizes.task == "decision":
        found += [n for n in ("states", "actions", "rewards", "returns_to_go", "timesteps") if n in accepted]
    found += [name for name in BESIDE if name in accepted]
    if sizes.task in PADDED and "attention_mask" in accepted:
        found.append("attention_mask")
    return found


PICTURES = (
    "image and text",
    "multimodal",
    "zero-shot images",
    "zero-shot detection",
    "visual questions",
    "retrieval",
    "pretraining",
    "base",
    "document questions",
)
BESIDE = ("bbox", "visual_feats", "visual_pos", "spatial_shapes")
"""What models that take it do not do without."""
PADDED = ("masked", "text to text", "sequence classification", "token classification", "text encoding")


def _given(sizes: Sizes, names: Sequence[str], accepted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    choices = []
    for name in names:
        maker = MAKERS.get(name)
        required = accepted[name].default is accepted[name].empty
        made = list(maker(sizes)) if maker else []
        optional = [] if required or name == names[0] else [None]
        choices.append([*made, *optional] or [None])
    for values in itertools.product(*choices):
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        yield _with_places(sizes, given)


def _with_places(sizes: Sizes, given: dict[str, Any]) -> dict[str, Any]:
    """Ids with as many places for images as the model makes features of them."""
    if "input_ids" not in given or not any(name.startswith("pixel_values") for name in given):
        return given
    token = sizes.get("image_token_id", "image_token_index")
    makes = getattr(sizes.model, "get_image_features", None) or getattr(
        getattr(sizes.model, "model", None), "get_image_features", None
    )
    if not isinstance(token, int) or makes is None:
        return given
    count = _features(sizes, makes, given)
    ids = given["input_ids"]
    if ids.dim() != 2 or not count:
        return given
    plain = torch.where(ids == token, torch.zeros_like(ids), ids)
    places = torch.full((ids.shape[0], count), token)
    placed = given | {"input_ids": torch.cat([plain[:, :2], places, plain[:, 2:]], 1)}
    if _takes(sizes, "mm_token_type_ids"):
        placed["mm_token_type_ids"] = (placed["input_ids"] == token).long()
    return placed | _places(sizes, placed)


def _places(sizes: Sizes, given: Mapping[str, Any]) -> dict[str, Any]:
    """Positions in three dimensions, as the model makes them of the kinds of tokens."""
    makes = getattr(getattr(sizes.model, "model", sizes.model), "get_rope_index", None)
    if makes is None or not _takes(sizes, "position_ids") or "mm_token_type_ids" not in given:
        return {}
    accepted = inspect.signature(makes).parameters
    return {"position_ids": makes(**{name: value for name, value in given.items() if name in accepted})[0]}


def _features(sizes: Sizes, makes: Callable[..., Any], given: Mapping[str, Any]) -> int:
    """Of a row."""
    accepted = inspect.signature(makes).parameters
    with torch.no_grad():
        try:
            made = makes(**{name: value for name, value in given.items() if name in accepted and name != "input_ids"})
        except Exception:
            return 0
    found = getattr(made, "pooler_output", made)
    if found is None:
        found = made[0]
    tensors = [found] if isinstance(found, Tensor) else [each for each in found if isinstance(each, Tensor)]
    return sum(each.numel() // each.shape[-1] for each in tensors) // ROWS


# ------------------------------------------------------------------------------------------------------- by their names


def _ids(sizes: Sizes, tokens: int = TOKENS, vocabulary: int | None = None) -> Tensor:
    """No padding, and no ids that stand for something else."""
    high = max(4, min(vocabulary or sizes.vocabulary, 100))
    taken = {
        v
        for c in configs(sizes.model)
        for n, v in vars(c).items()
        if n.endswith(("_id", "_index")) and isinstance(v, int)
    }
    free = torch.tensor([i for i in range(high) if i not in taken] or list(range(high)))
    if sizes.task == "multiple choice":
        return free[torch.randint(len(free), (ROWS, 2, tokens))]
    return free[torch.randint(len(free), (ROWS, tokens))]


def _input_ids(sizes: Sizes) -> Iterator[Any]:
    ids = _ids(sizes)
    end = sizes.get("eos_token_id")
    if isinstance(end, int) and sizes.task in ("text to text", "sequence classification", "zero-shot images", "base"):
        ids = ids.clone()
        ids[..., -1] = end  # where BART's classifier and CLIP look
    yield ids
    books = sizes.get("num_codebooks", "num_quantizers")
    if isinstance(books, int):
        yield _ids(sizes, TOKENS)[:, :, None].expand(-1, -1, books).clone()
        yield _ids(sizes, TOKENS)[:, None, :].expand(-1, books, -1).clone()
    yield _ids(sizes, 64)


def _channels(sizes: Sizes) -> int:
    found = sizes.get("num_channels", "in_channels", "in_chans", "channels", default=3)
    return found if isinstance(found, int) and found <= 8 else 3


def _pixel_values(sizes: Sizes) -> Iterator[Tensor]:
    height, width = sizes.image
    channels = _channels(sizes)
    if _takes(sizes, "image_grid_thw"):
        yield _patches(sizes)
        flat = _patches(sizes, frames=2)
        yield flat
        side = sizes.get("patch_size", default=8)
        yield flat[:, : flat.shape[1] // 2].reshape(len(flat), -1, side, side)
    if _takes(sizes, "spatial_shapes"):
        yield _patches(sizes).view(ROWS, GRID * GRID, -1)
    frames = sizes.get("num_frames", "frames_per_clip")
    images = torch.randn(ROWS, channels, height, width)
    if isinstance(frames, int):
        yield torch.randn(ROWS, frames, channels, height, width)
    yield images
    yield torch.randn(ROWS, 1, channels, height, width)
    yield torch.randn(ROWS, 2, channels, height, width)
    yield torch.randn(ROWS, channels, 64, 64)
    yield torch.randn(ROWS, 1, 1, channels, height, width)
    patch = sizes.get("patch_size", default=8)
    patch = patch if isinstance(patch, int) else 8
    yield torch.randn(ROWS, 16, channels * patch * patch)
    yield torch.randn(ROWS, channels, 128, 128)


def _takes(sizes: Sizes, name: str) -> bool:
    return name in inspect.signature(sizes.model.forward).parameters


GRID = 4
"""Patches to a side, where images are given as rows of patches."""


def _patches(sizes: Sizes, frames: int | None = None) -> Tensor:
    patch = sizes.get("patch_size", default=8)
    deep = frames or sizes.get("temporal_patch_size", default=1)
    return torch.randn(ROWS * GRID * GRID, _channels(sizes) * deep * patch * patch)


def _grid(sizes: Sizes) -> Iterator[Tensor]:
    yield torch.tensor([[1, GRID, GRID]] * ROWS)


def _merged(sizes: Sizes) -> Iterator[Tensor]:
    """How many patches to a side become one."""
    yield torch.full((ROWS,), 2)


def _input_values(sizes: Sizes) -> Iterator[Tensor]:
    yield torch.randn(ROWS, 1600)
    yield torch.randn(ROWS, 1, 1600)
    mels = sizes.get("num_mel_bins", "n_mels", default=16)
    yield torch.randn(ROWS, sizes.get("max_length", default=64), mels)
    yield torch.randn(ROWS, 1, 64, mels)
    yield torch.randn(ROWS, 16000)


def _input_features(sizes: Sizes) -> Iterator[Tensor]:
    mels = sizes.get(
        "num_mel_bins",
        "n_mels",
        "input_feat_per_channel",
        "feature_size",
        "feature_projection_input_dim",
        "input_dim",
        default=80,
    )
    frames = 2 * sizes.get("max_source_positions", default=32)
    yield torch.randn(ROWS, mels, frames)
    yield torch.randn(ROWS, 64, mels)
    yield torch.randn(ROWS, mels, 64)
    yield torch.randn(ROWS, 1, 64, mels)
    yield torch.randn(ROWS, 64, 80)
    yield torch.randn(ROWS, 64, 128)


def _past_values(sizes: Sizes) -> Iterator[Tensor]:
    length = sizes.get("context_length", "prediction_length", default=32)
    if _takes(sizes, "past_time_features"):
        yield torch.randn(ROWS, _past(sizes))
    yield torch.randn(ROWS, length, sizes.get("num_input_channels", default=1))
    yield torch.randn(ROWS, length)


def _hidden_states(sizes: Sizes) -> Iterator[Tensor]:
    width = sizes.get("hidden_size", "embed_dim", default=64)
    yield torch.randn(ROWS, TOKENS, width)
    yield _patches(sizes)


def _mask(sizes: Sizes) -> Iterator[Tensor]:
    lengths = TOKENS - torch.arange(ROWS) * 3 % (TOKENS // 2 + 1)
    mask = (torch.arange(TOKENS)[None] < lengths[:, None]).long()
    yield mask[:, None].expand(-1, 2, -1).clone() if sizes.task == "multiple choice" else mask


def _boxes() -> Tensor:
    """Left, top, right and bottom of each token, on a page of a thousand."""
    corners = torch.randint(500, (ROWS, TOKENS, 2))
    return torch.cat([corners, corners + torch.randint(1, 400, (ROWS, TOKENS, 2))], -1)


def _inputs(sizes: Sizes) -> Iterator[Tensor]:
    yield torch.randn(ROWS, TOKENS, sizes.get("d_model", default=64))
    yield _ids(sizes)


def _past(sizes: Sizes) -> int:
    """How far back a time series goes, lags included."""
    return (sizes.get("context_length", "prediction_length") or 32) + max(sizes.get("lags_sequence", default=[0]))


def _constant(*made: Callable[[Sizes], Any]) -> Callable[[Sizes], Iterator[Any]]:
    def maker(sizes: Sizes) -> Iterator[Any]:
        for each in made:
            yield each(sizes)

    return maker


MAKERS: Mapping[str, Callable[[Sizes], Iterator[Any]]] = {
    "input_ids": _input_ids, "pixel_values": _pixel_values, "input_values": _input_values,
    "input_features": _input_features, "past_values": _past_values, "hidden_states": _hidden_states, "grid_thw": _grid,
    "image_grid_thw": _grid, "image_merge_sizes": _merged, "merge_sizes": _merged, "attention_mask": _mask,
    "inputs": _inputs,
    "qformer_input_ids": _constant(lambda s: _ids(s)),
    "pixel_values_videos": _constant(
        lambda s: torch.randn(ROWS, s.get("num_frames", "frames_per_clip", default=4), _channels(s), *s.image)
    ),
    "past_time_features": _constant(
        lambda s: torch.randn(ROWS, _past(s), s.get("num_time_features", default=1))
    ),
    "past_observed_mask": _constant(
        lambda s: torch.ones(ROWS, _past(s))
    ),
    "past_values_padding": _constant(lambda s: torch.zeros(ROWS, _past(s), dtype=torch.long)),
    "freq": _constant(lambda s: torch.zeros(ROWS, 1, dtype=torch.long)),
    "input_features_mask": _constant(lambda s: torch.ones(ROWS, 64, dtype=torch.long)),
    "latents": _constant(lambda s: torch.randn(ROWS, TOKENS, s.get("hidden_size", default=64))),
    "flattened_patches": _constant(
        lambda s: torch.randn(ROWS, 16, 2 + _channels(s) * s.get("patch_size", default=16) ** 2)
    ),
    "inputs_embeds": _constant(lambda s: torch.randn(ROWS, TOKENS, s.get("hidden_size", default=64))),
    "query_embeds": _constant(lambda s: torch.randn(ROWS, 8, s.get("hidden_size", default=64))),
    "task_inputs": _constant(lambda s: _ids(s)),
    "prompt_pixel_values": _constant(lambda s: torch.randn(ROWS, _channels(s), *s.image)),
    "prompt_masks": _constant(lambda s: torch.randn(ROWS, _channels(s), *s.image)),
    "states": _constant(lambda s: torch.randn(ROWS, TOKENS, s.get("state_dim", default=17))),
    "actions": _constant(lambda s: torch.randn(ROWS, TOKENS, s.get("act_dim", default=4))),
    "rewards": _constant(lambda s: torch.randn(ROWS, TOKENS, 1)),
    "returns_to_go": _constant(lambda s: torch.randn(ROWS, TOKENS, 1)),
    "timesteps": _constant(lambda s: torch.arange(TOKENS).expand(ROWS, -1).clone()),
    "bbox": _constant(lambda s: _boxes()),
    "visual_feats": _constant(lambda s: torch.randn(ROWS, 8, s.get("visual_feat_dim", default=64))),
    "visual_pos": _constant(lambda s: torch.rand(ROWS, 8, s.get("visual_pos_dim", default=4))),
    "spatial_shapes": _constant(lambda s: torch.full((ROWS, 2), GRID)),
    "pixel_attention_mask": _constant(lambda s: torch.ones(ROWS, GRID * GRID, dtype=torch.long)),
    "bool_masked_pos": _constant(lambda s: torch.arange(64).expand(ROWS, -1) % 2 == 0),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- and their labels


def _labels(sizes: Sizes, accepted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What loss the task has, first; without labels, last."""
    for labels in _kinds(sizes):
        if all(name in accepted for name in labels):
            yield labels
    yield {}


def _kinds(sizes: Sizes) -> Iterator[dict[str, Any]]:
    classes = torch.randint(max(1, sizes.labels), (ROWS,))
    if sizes.task == "multiple choice":
        yield {"labels": torch.randint(2, (ROWS,))}
    elif sizes.task in ("question answering", "document questions"):
        places = torch.randint(TOKENS, (2, ROWS))
        yield {"start_positions": places[0], "end_positions": places[1]}
    elif sizes.task == "token classification":
        yield {"labels": torch.randint(max(1, sizes.labels), (ROWS, TOKENS))}
    elif sizes.task in ("text to text", "speech to text", "text recognition", "table recognition"):
        yield {"labels": _ids(sizes, ANSWER)}
    elif sizes.task == "CTC":
        yield {"labels": torch.randint(1, max(2, min(30, sizes.vocabulary)), (ROWS, 2))}
    elif sizes.task in ("causal", "masked", "image and text", "multimodal"):
        yield {"labels": SAME}
    elif sizes.task == "pretraining":
        yield {"labels": SAME, "next_sentence_label": torch.randint(2, (ROWS,))}
        yield {"labels": SAME}
        yield {"bool_masked_pos": torch.arange(16).expand(ROWS, -1) % 2 == 0}
    elif sizes.task == "next sentence":
        yield {"labels": torch.randint(2, (ROWS,))}
    elif sizes.task in ("semantic segmentation", "image segmentation"):
        yield {"labels": torch.randint(max(1, sizes.labels), (ROWS, *sizes.image))}
    elif sizes.task == "depth":
        yield {"labels": torch.rand(ROWS, *sizes.image)}
    elif sizes.task == "masked images":
        for places in (16, 4, 64):
            yield {"bool_masked_pos": torch.arange(places).expand(ROWS, -1) % 2 == 0}
    elif sizes.task == "zero-shot images":
        yield {"return_loss": True}
    elif sizes.task.startswith(("time series", "series")):
        length = sizes.get("prediction_length", default=8)
        channels = sizes.get("num_input_channels", default=1)
        yield {"future_values": torch.randn(ROWS, length, channels)}
        yield {
            "future_values": torch.randn(ROWS, length),
            "future_time_features": torch.randn(ROWS, length, sizes.get("num_time_features", default=1)),
        }
        yield {"future_values": torch.randn(ROWS, length)}
        yield {"target_values": torch.randn(ROWS, max(1, sizes.get("num_targets", default=1)))}
        yield {"target_values": torch.randint(2, (ROWS,))}
    elif "classification" in sizes.task or sizes.task == "speaker vectors":
        yield {"labels": classes}
    elif sizes.task == "audio frames":
        yield {"labels": torch.randint(max(1, sizes.labels), (ROWS, 4, 1)).expand(-1, -1, max(1, sizes.labels)).clone()}


SAME = object()
"""Labels that are the ids."""


def settled(batch: dict[str, Any]) -> dict[str, Any]:
    """With labels in place of `SAME`."""
    if batch.get("labels") is SAME:
        if "input_ids" not in batch:
            return {name: value for name, value in batch.items() if name != "labels"}
        return batch | {"labels": batch["input_ids"].clone()}
    return batch
