"""Engines that serve a model by a command or a file of sizes: vLLM, SGLang, TensorRT-LLM.

Sources: docs.vllm.ai, `vllm serve` (engine arguments); docs.sglang.io, server arguments; nvidia.github.io/TensorRT-LLM,
parallel strategy and `trtllm-serve --config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.views.engines.layout import Layout

CACHES: Mapping[str, Mapping[str, str]] = {
    "vllm": {"fp8": "fp8"}, "sglang": {"fp8": "fp8_e4m3"}, "tensorrt-llm": {"fp8": "fp8"}
}  # fmt: skip
"""How an engine calls a type in which keys and values are stored."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a plan for `generate()` says beside sizes. length: tokens of a prompt and its answer; storage: how keys and
    values are stored. None: not said.
    """

    length: int | None = None
    storage: str | None = None

    def cache(self, to: str) -> str | None:
        """An engine's word for the storage, where it has one."""
        return CACHES[to].get(self.storage or "")


def vllm(layout: Layout, name: str, served: Served) -> str:
    """A `vllm serve` command. Experts: over all devices of its tensor and data groups, which it has no size for."""
    words = [f"vllm serve {name}"]
    words += _sizes(layout, ("tensor", "pipeline", "data"), "--{}-parallel-size {}")
    if layout.experts > 1:
        words.append("--enable-expert-parallel")
    words += [f"--max-model-len {served.length}"] if served.length else []
    words += [f"--kv-cache-dtype {served.cache('vllm')}"] if served.cache("vllm") else []
    return " ".join(words) + "\n"


def sglang(layout: Layout, name: str, served: Served) -> str:
    """A `python -m sglang.launch_server` command. Where experts' axes split requests, attention is data-parallel, and
    its tensor size counts the devices of a replica.
    """
    tensor = layout.tensor * layout.data if layout.folded else layout.tensor
    words = [f"python -m sglang.launch_server --model-path {name} --tp-size {tensor}"]
    if layout.pipeline > 1:
        words.append(f"--pp-size {layout.pipeline}")
    if layout.data > 1:
        words.append(f"--dp-size {layout.data}")
    if layout.folded:
        words.append("--enable-dp-attention")
    if layout.experts > 1:
        words.append(f"--ep-size {layout.experts}")
    words += [f"--context-length {served.length}"] if served.length else []
    words += [f"--kv-cache-dtype {served.cache('sglang')}"] if served.cache("sglang") else []
    return " ".join(words) + "\n"


def tensorrt_llm(layout: Layout, name: str, served: Served) -> str:
    """The YAML that `trtllm-serve MODEL --config FILE` takes. Replicas are servers of their own there."""
    tensor = layout.tensor * layout.data if layout.folded else layout.tensor
    lines = [f"# trtllm-serve {name} --config THIS_FILE", f"tensor_parallel_size: {tensor}"]
    lines.append(f"pipeline_parallel_size: {layout.pipeline}")
    if layout.experts > 1:
        lines.append(f"moe_expert_parallel_size: {layout.experts}")
        lines.append(f"moe_tensor_parallel_size: {max(1, tensor // layout.experts)}")
        lines.append(f"enable_attention_dp: {str(layout.folded).lower()}")
    lines += [f"max_seq_len: {served.length}"] if served.length else []
    lines += ["kv_cache_config:", f"  dtype: {served.cache('tensorrt-llm')}"] if served.cache("tensorrt-llm") else []
    return "\n".join(lines) + "\n"


def notes(layout: Layout, to: str, served: Served) -> tuple[str, ...]:
    """What the engine decides by itself, and what it has no word for."""
    found = [
        "which parameters are split, and along which dim, the engine decides by rules of its own: it is told sizes"
    ]
    found += [f"{axis} gathers parameters for use (zero3): a replica there has all of them" for axis in layout.gathered]
    if to == "tensorrt-llm" and layout.data > 1 and not layout.folded:
        found.append(f"{layout.data} replicas: each is a server of its own")
    if served.storage is not None and served.cache(to) is None:
        found.append(f"keys and values are {served.storage} in the plan: there they are of the model's type")
    return tuple(found)


def _sizes(layout: Layout, names: tuple[str, ...], form: str) -> list[str]:
    sizes = {name: getattr(layout, name) for name in names}
    return [form.format(name, size) for name, size in sizes.items() if size > 1 or name == "tensor"]
