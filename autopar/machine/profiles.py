"""The TOML of a hardware profile, read into a `Hardware`: every number is checked, and named if it is wrong."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.base.errors import AutoparError
from autopar.base.files import read_text
from autopar.base.text import did_you_mean
from autopar.machine.curves import AttentionCurve, MatmulCurve, Points
from autopar.machine.hardware import Hardware
from autopar.machine.links import parse_link

_CLASSES = ("matmul", "convolution", "attention", "elementwise", "reduction", "memory")
"""Efficiencies that a profile must have; `_DERIVED` follow from them where it does not say otherwise."""
_DERIVED = {"attention_backward": "attention", "gather": "elementwise"}
_PHASES = ("forward", "backward")
_VARIANTS = ("", "_cudnn", "_softcap", "_dropout", "_bias")
"""Of attention: see `Hardware.attention_curve`."""
_EXAMPLE = "See the shipped profiles for an example"


MOST_BYTES = 1 << 18
"""Of a profile's file; those that are shipped, or measured, have a few thousand."""
LARGEST = 1e100
"""Of any number in a profile."""
MOST_KEYS, MOST_PARTS = 4096, 8
"""Of a profile, and of one key (`a.b.c`): reading TOML takes time with the square of both."""
_QUOTED = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+"""|\'\'\'(?:[^\']|\'(?!\'\'))*+\'\'\'|"(?:[^"\\\n]|\\.)*+"|\'[^\'\n]*+\'|#[^\n]*+',
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{MOST_PARTS}}}")


def _check_size(text: str, where: str) -> None:
    plain = _QUOTED.sub(lambda found: "" if found[0].startswith("#") else "_", text)
    num_keys = plain.count("=") + plain.count("[")
    for what, found, most in (
        ("bytes", len(text), MOST_BYTES),
        ("keys and lists", num_keys, MOST_KEYS),
        ("parts in one key", MOST_PARTS + 1 if _LONG_KEY.search(plain) else 0, MOST_PARTS),
    ):
        if found > most:
            raise AutoparError(
                f"A hardware profile has too many {what}",
                where=where,
                values=f"At least {found}, at most {most} are read",
                remedy=_EXAMPLE,
            )


class _Reader:
    """Numbers out of nested tables. where: the file, for messages."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def table(self, *keys: str) -> dict[str, Any]:
        """A table, empty where there is none, without its `source`."""
        value: Any = self.data
        for key in keys:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            raise AutoparError(
                f"A hardware profile needs a table {'.'.join(keys)}",
                where=self.where,
                values=f"It has {repr(value)[:200]}",
            )
        return {key: each for key, each in value.items() if key != "source"}

    def number(self, *keys: str) -> float:
        """A positive number, which must be there."""
        value: Any = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
            raise AutoparError(
                f"A hardware profile needs a positive number for {'.'.join(keys)}",
                where=self.where,
                values=f"It has {repr(value)[:200]}",
                remedy=_EXAMPLE,
            )
        return float(value)

    def whole(self, *keys: str) -> int:
        """A whole number of at least 1; a fraction is cut off."""
        if (value := self.number(*keys)) < 1:
            raise AutoparError(
                f"A hardware profile needs a number of at least 1 for {'.'.join(keys)}",
                where=self.where,
                values=f"It has {repr(value)[:200]}",
                remedy=_EXAMPLE,
            )
        return int(value)

    def numbers(self, *keys: str) -> dict[str, float]:
        """All numbers of a table."""
        return {key: self.number(*keys, key) for key in self.table(*keys)}

    def points(self, value: Any, *keys: str) -> Points:
        """Pairs of positive numbers, ascending in the first."""
        pairs = value if isinstance(value, list) else []
        good = bool(pairs) and all(
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < LARGEST for x in pair)
            for pair in pairs
        )
        if not good or any(a[0] >= b[0] for a, b in itertools.pairwise(pairs)):
            raise AutoparError(
                f"A hardware profile needs pairs of positive numbers, ascending in the first, for {'.'.join(keys)}",
                where=self.where,
                values=f"It has {repr(value)[:200]}",
                remedy=_EXAMPLE,
            )
        return tuple((float(x), float(y)) for x, y in pairs)


def parse(text: str, *, name: str, where: str) -> Hardware:
    """A profile from its TOML text. Raises AutoparError naming what is missing or does not serve."""
    _check_size(text, where)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also numbers and dates that Python has not
        raise AutoparError("A hardware profile is not TOML", where=where, values=str(error), remedy=_EXAMPLE) from error
    read = _Reader(data, where)
    number = read.number
    efficiency = {key: number("efficiency", key) for key in _CLASSES}
    for key, same in _DERIVED.items():
        efficiency[key] = number("efficiency", key) if key in read.table("efficiency") else efficiency[same]
    points = read.table("memory").get("points")
    optimizer, cache = read.table("optimizer"), "cache_bandwidth_bytes_per_s"
    return Hardware(
        name=str(data.get("name", name)),
        description=str(data.get("description", "")),
        peak_flops=read.numbers("peak_flops") or {"fp32": number("peak_flops", "fp32")},
        efficiency=efficiency | {"view": 1.0},
        memory_bandwidth_bytes_per_s=number("memory", "bandwidth_bytes_per_s"),
        memory_bytes=read.whole("memory", "bytes"),
        launch_overhead_s=number("launch", "kernel_s"),
        collective_launch_s=number("launch", "collective_s"),
        devices_per_node=read.whole("node", "devices"),
        node=parse_link(number, "node", read.table("node"), where),
        network=parse_link(number, "network", read.table("network"), where),
        sources={key: str(value.get("source", "")) for key, value in data.items() if isinstance(value, dict)},
        device=str(data.get("device", "cpu")),
        network_cards=read.whole(*(("network", "cards") if "cards" in read.table("network") else ("node", "devices"))),
        sustained=number("matmul", "sustained") if "sustained" in read.table("matmul") else 1.0,
        power_w=number("power", "watts") if "watts" in read.table("power") else None,
        overlap_slowdown=number("overlap", "slowdown") if "slowdown" in read.table("overlap") else 0.0,
        matmul={key: _matmul(read, key) for key, value in read.table("matmul").items() if isinstance(value, dict)},
        attention=_attention(read),
        plain_attention_s=_plain_attention(read),
        rates=read.numbers("rates"),
        memory_points=read.points(points, "memory", "points") if points is not None else (),
        memory_share=read.numbers("memory_share"),
        cache_bandwidth_bytes_per_s=number("memory", cache) if cache in read.table("memory") else None,
        decoded_per_s=number("codes", "decoded_per_s") if "decoded_per_s" in read.table("codes") else None,
        optimizer_passes=number("optimizer", "passes") if "passes" in optimizer else 20.0,
        optimizer_s_per_byte=number("optimizer", "seconds_per_byte") if "seconds_per_byte" in optimizer else None,
        optimizer_s_per_tensor=number("optimizer", "seconds_per_tensor") if "seconds_per_tensor" in optimizer else 0.0,
        graph_kernel_s=number("launch", "graph_kernel_s") if "graph_kernel_s" in read.table("launch") else None,
        host_kernel_s=number("launch", "host_kernel_s") if "host_kernel_s" in read.table("launch") else 0.0,
        host_collective_s=number("launch", "host_collective_s") if "host_collective_s" in read.table("launch") else 0.0,
        view_s=number("launch", "view_s") if "view_s" in read.table("launch") else 0.0,
        collective_busy=number("launch", "collective_busy") if "collective_busy" in read.table("launch") else 0.0,
        expert_imbalance=number("experts", "imbalance") if "imbalance" in read.table("experts") else 1.25,
        engine_step_s=number("engine", "step_s") if "step_s" in read.table("engine") else 0.0,
        engine_row_s=number("engine", "row_s") if "row_s" in read.table("engine") else 0.0,
    )


def _matmul(read: _Reader, format_: str) -> MatmulCurve:
    fields = read.numbers("matmul", format_)
    known = ("efficiency", "half_m", "half_n", "half_k", "half_area", "launch_s", "multiprocessors", "split_k")
    if unknown := [key for key in fields if key not in known]:
        raise AutoparError(
            f"A hardware profile has {', '.join(unknown)[:200]} in matmul.{format_[:60]}",
            where=read.where,
            remedy=f"Use {', '.join(known)}",
        )
    read.number("matmul", format_, "efficiency")
    return MatmulCurve(**fields)


def _attention(read: _Reader) -> dict[str, AttentionCurve]:
    """Curves by phase, and by format and phase: `[attention.forward.causal]`, `[attention.fp32.forward.causal]`."""
    found = {}
    half_rows = read.number("attention", "half_rows") if "half_rows" in read.table("attention") else 0.0
    for path in ((), *((key,) for key in read.table("peak_flops"))):
        variants = [f"{phase}{variant}" for variant in _VARIANTS for phase in _PHASES]
        for phase in variants:
            causal, full = (_by_head_size(read, "attention", *path, phase, seen) for seen in ("causal", "full"))
            if causal or full:
                found[".".join((*path, phase))] = AttentionCurve(causal or full, full, half_rows)
    return found


def _plain_attention(read: _Reader) -> dict[str, float]:
    """Seconds by kernel: `[plain_attention]`, flash_s and cudnn_s."""
    found = {key: value for key, value in read.table("plain_attention").items() if key != "source"}
    if unknown := [key for key in found if key not in ("flash_s", "cudnn_s")]:
        raise AutoparError(
            f"A hardware profile has {', '.join(unknown)[:200]} in plain_attention",
            where=read.where,
            remedy="Use flash_s, cudnn_s",
        )
    return {key.removesuffix("_s"): read.number("plain_attention", key) for key in found}


def _by_head_size(read: _Reader, *keys: str) -> tuple[tuple[int, Points], ...]:
    sizes = read.table(*keys)
    if not all(key.isdigit() for key in sizes):
        raise AutoparError(
            f"A hardware profile needs head sizes as keys of {'.'.join(keys)}",
            where=read.where,
            values=f"It has {', '.join(sizes)[:200]}",
        )
    return tuple((int(size), read.points(sizes[size], *keys, size)) for size in sorted(sizes, key=int))


ALIASES = {"h100": "h100-sxm", "a100": "a100-80"}
"""Short names, and the profiles that they stand for."""


def names() -> tuple[str, ...]:
    """The profiles shipped with autopar, sorted, without `ALIASES`."""
    files = resources.files("autopar.machine").joinpath("data", "hardware").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load(name_or_path: str | Path | Hardware) -> Hardware:
    """A shipped profile by name (any case), or one from a TOML file.

    Other links than the profile's follow after a colon: ``h100:ethernet-25``, ``h100:8xinfiniband-200``,
    ``h100:node=pcie5``; ``h100:engine`` runs programs as serving engines do (`Hardware.as_engine`). Raises AutoparError
    for an unknown name, and for a file that is damaged or lacks a number.
    """
    if isinstance(name_or_path, Hardware):
        return name_or_path
    return _load(str(name_or_path), files=True)


def load_shipped(name: str) -> Hardware:
    """The same without files, for names that a file says: a shipped profile, perhaps with other links."""
    return _load(name, files=False)


def _load(text: str, files: bool, most_links: int = 4) -> Hardware:
    name = text.lower()
    if name in names() or name in ALIASES:
        return _load_shipped(name)
    if files and text.endswith(".toml") and (path := Path(os.path.expanduser(text))).exists():
        content = read_text(path, "hardware profile", most_bytes=MOST_BYTES, remedy=_EXAMPLE)
        return parse(content, name=path.stem, where=text)
    base, colon, link = text.rpartition(":")
    if colon and base and link and most_links:
        found = _load(base, files, most_links - 1)
        if link == "engine":
            return found.as_engine()
        if link.startswith("node="):
            return found.with_links(node=link.removeprefix("node="))
        return found.with_links(network=link)
    raise AutoparError(
        f"There is no hardware profile {text[:200]!r}",
        values=f"Shipped with autopar: {', '.join((*names(), *ALIASES))}",
        remedy=did_you_mean(text, (*names(), *ALIASES)) + "Name one of these, or give the path of a profile (.toml)",
    )


_BY_GPU = (
    ("b200", "b200"),
    ("h200", "h200"),
    ("h800", "h800"),
    ("h100 pcie", "h100-pcie"),
    ("h100", "h100"),
    ("a100-sxm4-40", "a100-40"),
    ("a100-pcie-40", "a100-40"),
    ("a100", "a100"),
    ("v100", "v100"),
    ("mi300x", "mi300x"),
    ("l40s", "l40s"),
)


def guess(device_type: str) -> Hardware:
    """The profile for this machine's devices: `cpu` for CPU processes, by the GPU's name for CUDA ones."""
    if device_type != "cuda":
        return load("cpu")
    import torch

    device_name = torch.cuda.get_device_name()
    for part, name in _BY_GPU:
        if part in device_name.lower():
            return load(name)
    # Plans stay right on an unknown device, only their predicted times do not.
    logging.getLogger("autopar.hardware").warning(
        "no hardware profile for %s: costs are those of an A100; pass hardware= to choose another, or measure this one "
        "with autopar calibrate",
        device_name,
    )
    return load("a100")


@functools.cache
def _load_shipped(name: str) -> Hardware:
    if name in ALIASES:
        return replace(_load_shipped(ALIASES[name]), name=name)
    text = resources.files("autopar.machine").joinpath("data", "hardware", f"{name}.toml").read_text(encoding="utf-8")
    return parse(text, name=name, where=f"{name}.toml")
