"""Every pair of a task and an architecture in transformers' auto classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

TASKS = {
    "CAUSAL_LM": "causal", "MASKED_LM": "masked", "SEQ_TO_SEQ_CAUSAL_LM": "text to text",
    "IMAGE_CLASSIFICATION": "image classification", "AUDIO_CLASSIFICATION": "audio classification", "CTC": "CTC",
    "SPEECH_SEQ_2_SEQ": "speech to text", "RNNT": "transducer", "TDT": "transducer with durations",
    "IMAGE_TEXT_TO_TEXT": "image and text", "VIDEO_CLASSIFICATION": "video classification",
    "OBJECT_DETECTION": "detection", "ZERO_SHOT_OBJECT_DETECTION": "zero-shot detection",
    "SEMANTIC_SEGMENTATION": "semantic segmentation", "INSTANCE_SEGMENTATION": "instance segmentation",
    "UNIVERSAL_SEGMENTATION": "universal segmentation", "IMAGE_SEGMENTATION": "image segmentation",
    "DEPTH_ESTIMATION": "depth", "NORMAL_ESTIMATION": "normals", "POINTMAP_ESTIMATION": "point maps",
    "POSE_ESTIMATION": "pose", "TIME_SERIES_PREDICTION": "time series", "TIME_SERIES_REGRESSION": "series regression",
    "TIME_SERIES_CLASSIFICATION": "series classification", "ZERO_SHOT_IMAGE_CLASSIFICATION": "zero-shot images",
    "MASKED_IMAGE_MODELING": "masked images", "CAUSAL_IMAGE_MODELING": "causal images",
    "IMAGE_TO_IMAGE": "image to image",
    "IMAGE_MATTING": "matting", "KEYPOINT_DETECTION": "keypoints", "KEYPOINT_MATCHING": "keypoint matching",
    "MASK_GENERATION": "masks", "TEXT_RECOGNITION": "text recognition", "TABLE_RECOGNITION": "table recognition",
    "DOCUMENT_QUESTION_ANSWERING": "document questions", "TABLE_QUESTION_ANSWERING": "table questions",
    "VISUAL_QUESTION_ANSWERING": "visual questions", "AUDIO_FRAME_CLASSIFICATION": "audio frames",
    "AUDIO_XVECTOR": "speaker vectors", "TEXT_TO_SPECTROGRAM": "text to spectrogram",
    "TEXT_TO_WAVEFORM": "text to waveform",
    "DECISION": "decision", "RETRIEVAL": "retrieval", "MULTIMODAL_LM": "multimodal", "PRETRAINING": "pretraining",
    "SEQUENCE_CLASSIFICATION": "sequence classification", "TOKEN_CLASSIFICATION": "token classification",
    "QUESTION_ANSWERING": "question answering", "MULTIPLE_CHOICE": "multiple choice",
    "NEXT_SENTENCE_PREDICTION": "next sentence", "TEXT_ENCODING": "text encoding", "IMAGE": "image embedding",
    "BACKBONE": "backbone", "": "base",
}  # fmt: skip
"""The word in the name of an auto class's mapping, and ours, in the order in which pairs are asked: a class that serves
several tasks is asked for the first."""


PARTS = ("base", "backbone", "image embedding", "text encoding")


@dataclass(frozen=True, slots=True)
class Pair:
    """A task and the class that serves it for one kind of configuration."""

    task: str
    model_type: str
    architecture: str

    @property
    def key(self) -> str:
        return f"{self.task} | {self.model_type} | {self.architecture}"

    @staticmethod
    def of(key: str) -> Pair:
        return Pair(*key.split(" | "))

    def rank(self, salt: str = "") -> str:
        """A hexadecimal digest: an order that no choice of ours is in."""
        return sha256(f"{salt}{self.key}".encode()).hexdigest()


def pairs() -> tuple[Pair, ...]:
    """All, each class once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Pair] = {}
    for word, task in TASKS.items():
        name = f"MODEL_FOR_{word}_MAPPING_NAMES" if word else "MODEL_MAPPING_NAMES"
        for model_type, classes in _entries(getattr(modeling_auto, name, {})):
            found.setdefault(classes, Pair(task, model_type, classes))
    return tuple(found.values())


def _entries(mapping: Any) -> Iterator[tuple[str, str]]:
    for model_type, classes in mapping.items():
        for name in (classes,) if isinstance(classes, str) else classes:
            yield model_type, name


def in_order(chosen: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Each kind of configuration once, by digest, what has a task before what is a part; then their other tasks."""
    number: dict[str, int] = {}
    counted = []
    for pair in chosen:
        counted.append((number.get(pair.model_type, 0), pair.task in PARTS, pair.rank(), pair))
        number[pair.model_type] = number.get(pair.model_type, 0) + 1
    return tuple(pair for *_, pair in sorted(counted, key=lambda each: each[:3]))
