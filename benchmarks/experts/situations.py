"""Situations in which experts know what to choose, as models, devices and links: data of experts.py.

Each is what a source describes, no larger than it takes: blocks repeat, so where nothing depends on the depth few are
planned. `about` says what is real, and what was made smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.strategies.names import Strategy

ZEROPP = "ZeRO++ (2306.10209)"
HPZ: Mapping[str, str] = {"node": "zero2", "dp": "zero3"}


@dataclass(frozen=True, slots=True)
class Other:
    """A configuration to price beside the choice. microbatches: None: as many as are predicted fastest."""

    name: str
    mesh: str
    strategy: Strategy
    microbatches: int | None = None
    rematerialize: str = "auto"


@dataclass(frozen=True, slots=True)
class Situation:
    """row: of the literature's table, expected: its choice. batch: sequences x tokens.

    auto: meshes on which `auto` plans; searched: whether `autopar.search` compares all others of `hardware` x `gpus`,
    within `limits`. wanted: words of `priced.traits_of`, joined by " & ", of which one group must be there; unwanted:
    words of which none may. lacks: what autopar cannot do at all.
    """

    name: str
    row: str
    expected: str
    about: str
    model: str
    batch: tuple[int, int]
    hardware: str
    gpus: int
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()
    searched: bool = False
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)
    others: tuple[Other, ...] = ()
    overrides: Mapping[str, object] = field(default_factory=dict, hash=False)
    limit_gb: float | None = None
    lacks: str = ""

    def agrees(self, traits: tuple[str, ...]) -> bool:
        """Whether a choice with these traits is the literature's."""

        def has(pattern: str) -> bool:
            return any(fnmatchcase(trait, pattern) for trait in traits)

        wanted = not self.wanted or any(all(map(has, each.split(" & "))) for each in self.wanted)
        return wanted and not any(map(has, self.unwanted))


_BETWEEN = (
    Other("zero3 over all, one ring", "dp=64", "zero3"),
    Other("zero2 over all, one ring", "dp=64", "zero2"),
    Other("hsdp", "node=8,dp=8", "hsdp"),
    Other("hpZ", "node=8,dp=8", HPZ),
    Other("3D", "pp=4,dp=4,tp=4", {"dp": "zero2", "tp": "tensor+sequence"}),
)
"""On 64 devices in nodes of eight."""
_CONTEXT = ("ulysses", "ring", "allgather_kv")

SITUATIONS = (
    Situation(
        "fits",
        "fits one device, several devices",
        "ddp, or zero1/2",
        "GPT-2 XL, 1.6 billion parameters, whole; eight H100 of one node",
        "gpt2-xl",
        (64, 1024),
        "h100",
        8,
        wanted=("whole *", "zero2 *"),
        unwanted=("zero3 *", "tensor *", "pipeline *"),
        auto=("dp=8",),
        searched=True,
        limits={"cp": 1, "pp": 8},
        others=(
            Other("ddp", "dp=8", "ddp"),
            Other("zero1", "dp=8", "zero1"),
            Other("zero3", "dp=8", "zero3"),
            Other("tensor", "tp=8", "tensor+sequence"),
            Other("pipeline", "pp=8", "pipeline"),
        ),
    ),
    Situation(
        "too-large",
        "does not fit one device",
        "zero3, or a pipeline",
        "Llama 3.1 8B, whole: 16 bytes a parameter are 120 GiB; eight H100 of one node",
        "llama-3.1-8b",
        (64, 4096),
        "h100",
        8,
        wanted=("zero3 *", "pipeline *"),
        unwanted=("tensor *",),
        searched=True,
        limits={"cp": 1},
        others=(
            Other("ddp", "dp=8", "ddp", 8),
            Other("zero2", "dp=8", "zero2", 8),
            Other("pipeline", "pp=8", "pipeline"),
            Other("pipeline and data", "pp=2,dp=4", {"dp": "zero2"}),
            Other("tensor", "tp=8", "tensor+sequence", 8),
        ),
    ),
    Situation(
        "largest-layer",
        "the largest layer does not fit",
        "tensor or zero3",
        "Llama 3.1 405B's width, two blocks of 126: a block's states are 48 GiB, a device has 37; two nodes of eight "
        "A100 40 GB",
        "llama-3.1-405b",
        (32, 2048),
        "a100-40",
        16,
        wanted=("zero3 *", "tensor inside"),
        searched=True,
        limits={"cp": 1},
        overrides={"num_hidden_layers": 2},
        others=(
            Other("pipeline alone", "pp=4,dp=4", {"dp": "ddp"}),
            Other("pipeline and zero2", "pp=4,dp=4", {"dp": "zero2"}),
            Other("zero3", "dp=16", "zero3"),
            Other("tensor in the node", "dp=2,tp=8", {"dp": "ddp", "tp": "tensor+sequence"}),
        ),
    ),
    Situation(
        "fast-network",
        "links of 1 Tb/s and more between nodes",
        "zero3 or 3D",
        "Llama 3.1 8B, whole, 2048 tokens a device; eight DGX A100, 8 x 200 Gb/s a node, 24 GB of memory to be "
        f"used, so that zero2 does not fit (18 billion parameters on 32 GB: {ZEROPP})",
        "llama-3.1-8b",
        (128, 1024),
        "a100:8xinfiniband-200",
        64,
        wanted=("zero3 across", "tensor * & pipeline *"),
        auto=("dp=64", "node=8,dp=8"),
        searched=True,
        limits={"cp": 1},
        others=_BETWEEN,
        limit_gb=24.0,
    ),
    Situation(
        "medium-network",
        "100–400 Gb/s between nodes",
        "hsdp / hpZ",
        f"Llama 3.1 8B, whole, 2048 tokens a device ({ZEROPP}); eight nodes of eight A100, 4 x 100 Gb/s a node",
        "llama-3.1-8b",
        (128, 1024),
        "a100:4xinfiniband-100",
        64,
        wanted=("zero2 inside", "zero3 inside"),
        unwanted=("zero3 across", "pipeline *"),
        auto=("dp=64", "node=8,dp=8"),
        searched=True,
        limits={"cp": 1},
        others=_BETWEEN,
    ),
    Situation(
        "slow-network",
        "slow links between nodes",
        "no zero3 across them: zero2 and a pipeline",
        "Llama 3.1 8B, whole; four nodes of eight A100, one card of 10 Gb/s a node",
        "llama-3.1-8b",
        (64, 1024),
        "a100:ethernet-10",
        32,
        wanted=("pipeline across",),
        unwanted=("zero3 across",),
        auto=("node=4,dp=8", "pp=4,dp=8"),
        searched=True,
        limits={"cp": 1},
        others=(
            Other("zero3 over all", "dp=32", "zero3"),
            Other("hsdp", "node=4,dp=8", "hsdp"),
            Other("zero2 and a pipeline", "pp=4,dp=8", {"dp": "zero2"}),
            Other("tensor across", "tp=32", "tensor+sequence"),
        ),
    ),
    Situation(
        "nvlink-and-infiniband",
        "NVLink inside, InfiniBand across",
        "tensor inside the node, pipeline across, data over the rest; as few stages as memory allows",
        "Llama 3.1 70B, whole, a batch of 256 x 4096; 64 H100, 400 Gb/s a device",
        "llama-3.1-70b",
        (256, 4096),
        "h100",
        64,
        wanted=("tensor inside & pipeline across",),
        unwanted=("tensor across", "pipeline inside"),
        searched=True,
        limits={"cp": 1},
        others=(
            Other("tensor across nodes", "pp=2,dp=2,tp=16", {"dp": "zero2", "tp": "tensor+sequence"}, 64),
            Other("pipeline inside, tensor outside", "tp=8,pp=8", {"tp": "tensor+sequence"}, 128),
            Other("as few stages", "pp=4,dp=2,tp=8", {"dp": "zero2", "tp": "tensor+sequence"}, 128),
            Other("more stages", "pp=8,tp=8", {"tp": "tensor+sequence"}, 128),
            Other("zero3 over all", "dp=64", "zero3", 4),
        ),
    ),
    Situation(
        "sequence-up-to-heads",
        "long sequences",
        "sequence or context parallelism with fused attention; ulysses up to the number of (KV) heads",
        "Llama 3.1 8B's width with 32 KV heads (multi-head, as in the paper), two blocks of 32; one sequence of 32768; "
        "eight H100 of one node",
        "llama-3.1-8b",
        (1, 32768),
        "h100",
        8,
        wanted=("ulysses",),
        auto=("cp=8",),
        overrides={"num_hidden_layers": 2, "num_key_value_heads": 32},
        others=(*(Other(name, "cp=8", name) for name in _CONTEXT), Other("tensor", "tp=8", "tensor+sequence")),
    ),
    Situation(
        "sequence-beyond-heads",
        "long sequences (beyond the heads)",
        "ring beyond the number of (KV) heads",
        "Llama 3.1 8B's width, two blocks of 32, 8 KV heads; one sequence of 262144; two nodes of eight H100",
        "llama-3.1-8b",
        (1, 262144),
        "h100",
        16,
        wanted=("ring",),
        auto=("cp=16", "cp0=2,cp1=8"),
        overrides={"num_hidden_layers": 2, "max_position_embeddings": 262144},
        others=(
            *(Other(name, "cp=16", name) for name in _CONTEXT),
            Other("ring across, ulysses inside", "cp0=2,cp1=8", {"cp0": "ring", "cp1": "ulysses"}),
            Other("tensor", "tp=16", "tensor+sequence"),
        ),
    ),
    Situation(
        "memory-short",
        "memory short, compute to spare",
        "recompute before offload; offload before NVMe",
        "Llama 3.1 8B, whole, two sequences of 8192 a device at once; eight H100 of one node",
        "llama-3.1-8b",
        (16, 8192),
        "h100",
        8,
        wanted=("recompute *",),
        auto=("dp=8",),
        others=(
            Other("nothing recomputed", "dp=8", "zero3", rematerialize="none"),
            Other("everything recomputed", "dp=8", "zero3", rematerialize="full"),
        ),
        lacks="autopar has neither offload nor NVMe, so neither is weighed: what is compared is recomputation alone",
    ),
)
