"""Hardware profiles: what one device computes, moves and holds, and how fast its links are.

A profile is a TOML file (``data/hardware/*.toml``, or one of the user's own, as `autopar calibrate` writes). Each of
its tables names the ``source`` of its numbers. Links are given per direction and per device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.base.errors import AutoparError
from autopar.machine import links
from autopar.machine.curves import FEW_ROWS, AttentionCurve, MatmulCurve, Points, interpolate
from autopar.machine.links import Link

# What an operator is, as far as its speed goes. A "view" moves nothing and costs nothing.
OP_CLASSES = ("matmul", "convolution", "attention", "attention_backward", "elementwise", "reduction", "gather", "view")
PRODUCTS = ("matmul", "convolution", "attention", "attention_backward")
"""Those that compute in narrow formats where a device has them."""

FUSED_KERNELS = ("rms_norm", "rotary", "stored_attention", "rotary_write", "experts")
"""What a kernel of autopar's may be of: an RMSNorm, a rotary embedding that are spelled out, attention of a few queries
to keys and values that are stored as codes, a token's rotary embedding with what it writes into a cache, or that alone,
grouped products of experts.
"""


# Peak FLOP/s are kept by hardware format; integer and boolean operators run on the fp32 units.
_FORMATS = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8", "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8", "complex64": "fp32",
    "complex128": "fp64", "int64": "fp32", "int32": "fp32", "int16": "fp32", "int8": "fp32", "uint8": "fp32",
    "bool": "fp32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and its links.

    peak_flops: FLOP/s by format (fp64, fp32, tf32, bf16, fp16, fp8), dense. efficiency: the fraction of the peak that
    each class of operators (`OP_CLASSES`) reaches where no curve says it better; "memory" is the fraction of the memory
    bandwidth. matmul: curves by format; attention: by "forward" and "backward", or for one format by "bf16.forward".
    plain_attention_s: measured seconds of one plain attention, forward and backward, by the kernels of PyTorch's that
    serve it (`flash`, `cudnn`); none: not measured.
    rates: FLOP/s (as the rules count them) of single operators, by name (`silu`, `_softmax_backward_data`), that
    compute more than they move.
    memory_points: (bytes moved, bytes a second); none: the bandwidth times efficiency["memory"] at any size.
    memory_share: the fraction of it that a class, or an operator by its name, reaches, where that is not 1.
    cache_bandwidth_bytes_per_s: of the cache that all cores share, where they read what others just read; None: not
    known. decoded_per_s: of numbers that kernels make of codes beside products, which cannot multiply these; None: for
    nothing. head_by_head: whether kernels of attention of few queries read keys and values once for each query head, as
    engines' did before they had some for grouped heads (`repeated_s`). attention_rows: of a tile of such attention,
    which is computed whole: queries times the query heads of a key head.
    optimizer_passes: how often AdamW's update goes over the bytes of the parameters; optimizer_s_per_byte: measured
    seconds of it for a byte of parameters, instead; optimizer_s_per_tensor: what the host takes for each parameter of a
    step, where that is waited for.
    launch_overhead_s: a kernel's floor; graph_kernel_s: that of one in a CUDA graph; None: not known. graphs: whether
    programs run as CUDA graphs, which write states in place (`in_graphs`). view_s: of an operator that moves nothing.
    All as they are among others. host_kernel_s, host_collective_s: what the host takes to queue one, beside the device
    (`autopar.cost.hosts`); 0: not known.
    engine: whether programs run as serving engines run them (`as_engine`). engine_step_s, engine_row_s: what such an
    engine's host takes between two forwards, while the device waits, and what of it for each sequence (`between_s`).
    whole_prompts: whether it has kernels that know what of a cache is written, and prompts go through it in one call.
    collective_busy: the part of a collective's time in which it takes the device from what computes, so that nothing
    is hidden behind it.
    node, network: the links between devices of one node, and between nodes, there of one network card.
    network_cards: of a node. collective_launch_s: a collective's floor.
    device: torch's type of it, `cuda` or `cpu`: on `cuda` autopar has Triton kernels.
    fused_kernels: of `FUSED_KERNELS`, those that run there. compiled: regions run through
    torch.compile, so that elementwise operators that follow one another are one kernel (`autopar.fusion`).
    sustained: the fraction of a product's speed by itself that it keeps in a run of minutes. power_w: what the device
    may draw, watts; power_limit_w: a lower limit that is set. overlap_slowdown: by how much longer the compute takes
    while a collective runs beside it, as a fraction of that time. expert_imbalance: of the models that run there rather
    than of the device: where tokens go to the ranks of their experts, how many of them the busiest rank gets for each
    that a rank gets on the average.
    """

    name: str
    description: str
    peak_flops: Mapping[str, float] = field(hash=False)
    efficiency: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_overhead_s: float
    collective_launch_s: float
    devices_per_node: int
    node: Link
    network: Link
    sources: Mapping[str, str] = field(hash=False, compare=False)
    device: str = "cpu"
    network_cards: int = 1
    matmul: Mapping[str, MatmulCurve] = field(hash=False, default_factory=dict)
    attention: Mapping[str, AttentionCurve] = field(hash=False, default_factory=dict)
    plain_attention_s: Mapping[str, float] = field(hash=False, default_factory=dict)
    rates: Mapping[str, float] = field(hash=False, default_factory=dict)
    memory_points: Points = ()
    memory_share: Mapping[str, float] = field(hash=False, default_factory=dict)
    cache_bandwidth_bytes_per_s: float | None = None
    decoded_per_s: float | None = None
    optimizer_passes: float = 20.0
    optimizer_s_per_byte: float | None = None
    optimizer_s_per_tensor: float = 0.0
    view_s: float = 0.0
    collective_busy: float = 0.0
    fused_kernels: tuple[str, ...] = FUSED_KERNELS
    compiled: bool = False
    sustained: float = 1.0
    power_w: float | None = None
    power_limit_w: float | None = None
    overlap_slowdown: float = 0.0
    expert_imbalance: float = 1.25
    graph_kernel_s: float | None = None
    host_kernel_s: float = 0.0
    host_collective_s: float = 0.0
    graphs: bool = False
    engine: bool = False
    whole_prompts: bool = False
    engine_step_s: float = 0.0
    engine_row_s: float = 0.0
    head_by_head: bool = False
    attention_rows: float = FEW_ROWS

    def in_graphs(self) -> Hardware:
        """As a program runs that is a CUDA graph (`autopar.runtime.graphs`): kernels that nobody launches, states that
        are written in place. Only on CUDA; elsewhere, and where that is so already, the profile as it is.
        """
        if self.device != "cuda" or self.graphs:
            return self
        return replace(self, graphs=True, launch_overhead_s=self.graph_kernel_s or self.launch_overhead_s)

    def as_engine(self) -> Hardware:
        """As serving engines (vLLM, TensorRT-LLM, SGLang) run a model: as CUDA graphs (`in_graphs`), with elementwise
        operators fused, with all-reduces in which ranks of a node read each other's memory (`Link.by_peers`), with
        products that read weights which are stored as codes as they are, with attention of prompts that knows what is
        written (`whole_prompts`), and with a host between two forwards (`between_s`).
        autopar's own programs have these things on one device, or not at all: it is for asking what a mesh is worth
        there.
        """
        node = replace(self.node, by_peers=self.node.peer_bandwidth_bytes_per_s is not None)
        name = self.name if self.name.endswith(":engine") else f"{self.name}:engine"
        return replace(self.in_graphs(), node=node, compiled=True, engine=True, whole_prompts=True, name=name)

    def in_chunks(self) -> Hardware:
        """As prompts go through it in pieces, of which each but the first sees what was written before; as it is where
        they are priced as reading all of a cache anyway.
        """
        return replace(self, whole_prompts=False) if self.whole_prompts else self

    def between_s(self, rows: float) -> float:
        """Seconds between two forwards of so many sequences in which an engine's device waits for the host that chooses
        what runs next; 0 for what is no engine, and for engines whose hosts choose while the device computes.
        """
        return self.engine_step_s + rows * self.engine_row_s if self.engine else 0.0

    def with_experts(self, imbalance: float | None) -> Hardware:
        """The profile with another `expert_imbalance`; None: as it is. Raises AutoparError for less than 1."""
        if imbalance is None:
            return self
        if not 1.0 <= imbalance < math.inf:
            raise AutoparError(
                f"expert_imbalance={imbalance}: the busiest rank gets at least as many as a rank on the average",
                remedy="pass 1 or more: 1.0 where all get the same, or autopar.expert_imbalance(loads, ranks)",
            )
        return replace(self, expert_imbalance=float(imbalance))

    def kept_speed(self, op_class: str) -> float:
        """The fraction of the speed of one kernel by itself that operators of a class keep in a run of minutes.

        Products keep `sustained` of it. Under a power limit below the device's own, products and attention slow down
        with the clock: power goes as frequency · voltage², and voltage as frequency, so the clock as the cube root of
        the power. What waits for memory does not slow down.
        """
        if op_class not in PRODUCTS:
            return 1.0
        clock = 1.0
        if self.power_w is not None and self.power_limit_w is not None:
            clock = min(1.0, (self.power_limit_w / self.power_w) ** (1 / 3))
        return clock * (self.sustained if op_class in ("matmul", "convolution") else 1.0)

    def format_of(self, dtype: object) -> str:
        """The hardware format of a torch dtype, or of its name."""
        name = str(dtype).removeprefix("torch.")
        return _FORMATS.get(name, name)

    def peak_flops_per_s(self, dtype: object) -> float:
        """The peak of a dtype. Raises AutoparError where the device has no such format."""
        peak = self.peak_flops.get(self.format_of(dtype))
        if peak is None:
            raise AutoparError(
                f"{str(dtype).removeprefix('torch.')} has no peak FLOP/s in the hardware profile {self.name}",
                values=f"The profile has {', '.join(self.peak_flops)}",
                remedy="Use one of these, or add the number to a profile of your own and pass its path",
            )
        return peak

    def flops_per_s(self, dtype: object, op_class: str) -> float:
        """FLOP/s that a large operator of this class and dtype (a torch dtype, or its name) reaches. Floats of eight
        bits are only read and written by what is no product, which computes in 32.

        Raises AutoparError where the device has no such format, and ValueError for an unknown class.
        """
        if op_class not in OP_CLASSES:
            raise ValueError(f"op_class {op_class!r} is none of {', '.join(OP_CLASSES)}")
        narrow = self.format_of(dtype) == "fp8" and op_class not in PRODUCTS
        peak = self.peak_flops_per_s("float32" if narrow else dtype)
        if op_class == "matmul" and (curve := self.matmul.get(self.format_of(dtype))) is not None:
            return peak * curve.efficiency
        return peak * self.efficiency[op_class]

    def attention_curve(self, dtype: object, phase: str, variant: str = "") -> AttentionCurve | None:
        """The curve of a phase (`forward`, `backward`) for a dtype, else that for all dtypes, else None; of a variant
        (`softcap`, `dropout`, `bias`, `masked`) that a profile has not, the plain one. Plain attention has cuDNN's
        where it goes there.
        """
        variant = variant or self.plain_attention
        for name in (f"{phase}_{variant}", phase):
            for key in (f"{self.format_of(dtype)}.{name}", name):
                if key in self.attention:
                    return self.attention[key]
        return None

    @property
    def plain_attention(self) -> str:
        """The kernel that was measured to be the fastest for plain attention; "" where fewer than two were."""
        found = self.plain_attention_s
        return min(found, key=lambda kernel: (found[kernel], kernel)) if len(found) > 1 else ""

    def memory_bytes_per_s(self, moved_bytes: float, op_class: str = "elementwise", name: str = "") -> float:
        """What an operator that reads and writes so many bytes gets of the memory, caches included."""
        share = self.memory_share.get(name) or self.memory_share.get(op_class, 1.0)
        if self.memory_points:
            return interpolate(self.memory_points, moved_bytes) * share
        return self.memory_bandwidth_bytes_per_s * self.efficiency["memory"] * share

    def repeated_s(self, moved_bytes: float, times: float) -> float:
        """Seconds to read what was just read from memory so many times more: from the cache that all cores share, and
        where its speed is not known from memory.
        """
        known = self.cache_bandwidth_bytes_per_s or self.memory_bytes_per_s(moved_bytes)
        return times * moved_bytes / known

    def with_links(self, *, node: str | None = None, network: str | None = None) -> Hardware:
        """The same device with other links, by name (`autopar.links.catalogue`): ``network="8xinfiniband-400"``.

        Raises AutoparError for a name that there is not.
        """
        changed, name = self, self.name
        if node is not None:
            changed = replace(changed, node=links.named(node)[0].link())
            name = f"{name}:node={node.strip()}"
        if network is not None:
            found, cards = links.named(network)
            changed = replace(changed, network=found.link(), network_cards=cards or self.network_cards)
            name = f"{name}:{network.strip()}"
        sources = dict(self.sources)
        for section, text in (("node", node), ("network", network)):
            if text is not None:
                sources[section] = links.named(text)[0].source
        return replace(changed, name=name, sources=sources)
