"""What compiling a kernel ahead of time needs: no GPU, no tensors (`triton.compile` for a named architecture)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One kernel in one configuration.

    name: what a table prints.
    kernel: the function that `triton.jit` made; not an interpreted one (TRITON_INTERPRET unset when it was imported).
    signature: type of each argument that is no constexpr, as Triton writes it ("*fp16", "i32").
    constexprs: values of the others.
    num_warps, num_stages: as in a launch.
    aligned: arguments that a launch would find divisible by 16 (addresses, strides): loads are vectorized by it.
    max_registers: of a thread; 0: no limit but the architecture's.
    capabilities: compute capabilities the configuration is meant for (80: A100, 90: H100).
    """

    name: str
    kernel: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = (80, 90)
    max_registers: int = 0

    def source(self) -> ASTSource:
        """What `triton.compile(spec.source(), target=GPUTarget("cuda", 90, 32), options=spec.options())` compiles."""
        names = self.kernel.arg_names
        signature = {name: "constexpr" if name in self.constexprs else self.signature[name] for name in names}
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned}
        return ASTSource(self.kernel, signature, self.constexprs, attributes)

    def options(self) -> dict[str, int]:
        limit = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}
