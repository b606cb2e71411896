"""What of the facts is off. Pure: facts of all ranks go in, findings come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.api.doctor.facts import UNLIMITED, Facts
from autopar.api.doctor.findings import Finding, are, by_value, note, off, ok, size, who

OLDEST = {"Python": (3, 11), "torch": (2, 11)}
FILES, FILES_A_RANK = 512, 4
"""Open files that a process needs: its own, and of each other rank two files of a checkpoint and two connections."""
SHM_BYTES_A_RANK = 128 << 20
"""What data loaders' workers and NCCL take of /dev/shm; containers often have 64 MiB for all."""
FREE_SHARE = 0.8
"""Of a GPU's memory, before a run begins."""


def judge(facts: Sequence[Facts]) -> list[Finding]:
    """All that ranks' facts say, in rank order."""
    hosts = [each.host for each in facts]
    return [
        finding for part in (_versions, _packages, _devices, _threads, _limits, _shm) for finding in part(facts, hosts)
    ]


def _versions(facts: Sequence[Facts], hosts: Sequence[str]) -> Iterator[Finding]:
    for name, get in (
        ("Python", lambda each: each.python),
        ("torch", lambda each: each.packages.get("torch", "")),
        ("autopar", lambda each: each.autopar),
        ("CUDA", lambda each: each.cuda),
        ("NCCL", lambda each: each.nccl),
    ):
        found = by_value(facts, get)
        (most, _), *others = found.items()
        if others:
            said = "; ".join(f"{who(ranks, hosts)} {_have(ranks)} {version or 'none'}" for version, ranks in others)
            yield off(
                "versions",
                f"{name} is {most or 'missing'} on most ranks, {said}",
                "Install the same versions on every machine: programs and messages are those of one version",
            )
        elif most and name in OLDEST and _numbers(most) < OLDEST[name]:
            oldest = ".".join(map(str, OLDEST[name]))
            yield off("versions", f"{name} is {most}", f"autopar needs {name} {oldest} or newer")
        elif most:
            yield ok("versions", f"{name} {most}")


def _packages(facts: Sequence[Facts], hosts: Sequence[str]) -> Iterator[Finding]:
    for name, serves in (("xxhash", "checkpoints"), ("safetensors", "loading weights"), ("ortools", "")):
        without = [each.rank for each in facts if name not in each.packages]
        if without and serves:
            yield off(
                "packages",
                f"{who(without, hosts)} {_have(without)} no {name}, which {serves} need",
                f"pip install {name}",
            )
        elif without and 0 in without:
            yield note("packages", f"no {name}: plans are searched by message passing alone (pip install {name})")
    for name in ("numpy", "triton", "transformers"):
        found = by_value([each.packages.get(name, "none") for each in facts], str)
        if len(found) > 1:
            said = "; ".join(f"{version} on {who(ranks, hosts)}" for version, ranks in found.items())
            yield off("packages", f"{name} differs: {said}", "Install the same versions on every machine")


def _devices(facts: Sequence[Facts], hosts: Sequence[str]) -> Iterator[Finding]:
    kinds = by_value(facts, lambda each: "no GPU" if each.device is None else each.device.name)
    said = "; ".join(f"{kind}: {who(ranks, hosts)}" for kind, ranks in kinds.items())
    if len(kinds) > 1:
        yield off("devices", said, "A step is as fast as the slowest device: ask for machines of one kind")
    else:
        yield ok("devices", f"{_all(facts)}: {next(iter(kinds))}")
    few = [each.rank for each in facts if each.device is not None and each.devices < each.local_ranks]
    if few:
        one = facts[few[0]]
        yield off(
            "devices",
            f"{who(few, hosts)} {are(few)} on a machine with {one.devices} GPUs and {one.local_ranks} ranks",
            "torchrun --nproc-per-node as many as there are GPUs; see CUDA_VISIBLE_DEVICES",
        )
    for each in facts:
        gpu = each.device
        if gpu is not None and gpu.free_bytes < FREE_SHARE * gpu.total_bytes:
            yield off(
                "devices",
                f"{size(gpu.total_bytes - gpu.free_bytes)} of {size(gpu.total_bytes)} of the GPU of "
                f"{who([each.rank], hosts)} are taken",
                "nvidia-smi says which processes hold it: a job before this one may not have ended",
            )
    if wrong := [each.rank for each in facts if not each.computes]:
        yield off(
            "devices",
            f"{who(wrong, hosts)} {are(wrong)} wrong about a product of small whole numbers",
            "Take the machine out: its memory or its processor does wrong",
        )


def _threads(facts: Sequence[Facts], hosts: Sequence[str]) -> Iterator[Finding]:
    crowded = [each.rank for each in facts if each.local_ranks > 1 and each.threads * each.local_ranks > each.cores]
    one = facts[crowded[0]] if crowded else facts[0]
    said = f"ranks of a machine: {one.local_ranks}; threads of each: {one.threads}; cores: {one.cores}"
    if crowded and one.threads > 1:
        least = max(1, one.cores // one.local_ranks)
        yield off("threads", f"{said}: {who(crowded, hosts)}", f"OMP_NUM_THREADS={least}")
    elif crowded:
        yield note("threads", f"{said}: they take turns")
    else:
        yield ok("threads", said)


def _limits(facts: Sequence[Facts], hosts: Sequence[str]) -> Iterator[Finding]:
    needed = FILES + FILES_A_RANK * len(facts)
    few = [each.rank for each in facts if UNLIMITED != each.open_files < needed]
    if few:
        yield off(
            "limits",
            f"{who(few, hosts)} may open {facts[few[0]].open_files} files, {needed} may be needed",
            f"ulimit -n {max(65536, needed)} before the start (LimitNOFILE= of a service, --ulimit nofile=)",
        )
    else:
        most = min((each.open_files for each in facts if each.open_files != UNLIMITED), default=None)
        yield ok("limits", "open files without limit" if most is None else f"{most} open files")
    short = [each.rank for each in facts if each.is_infiniband and each.locked_bytes != UNLIMITED]
    if short:
        yield off(
            "limits",
            f"{who(short, hosts)} may lock {size(facts[short[0]].locked_bytes)} of memory, and InfiniBand locks what "
            "it sends",
            "ulimit -l unlimited (LimitMEMLOCK=infinity of a service, --ulimit memlock=-1 of a container)",
        )


def _shm(facts: Sequence[Facts], hosts: Sequence[str]) -> Iterator[Finding]:
    known = [each for each in facts if each.shm_bytes is not None]
    short = [each.rank for each in known if (each.shm_bytes or 0) < SHM_BYTES_A_RANK * each.local_ranks]
    if short:
        one = facts[short[0]]
        yield off(
            "shm",
            f"{size(one.shm_bytes or 0)} are free in /dev/shm for {one.local_ranks} ranks: {who(short, hosts)}",
            "docker run --shm-size=16g or --ipc=host; on Kubernetes an emptyDir with medium: Memory at /dev/shm: data "
            "loaders' workers and NCCL pass data through it",
        )
    elif known:
        yield ok("shm", f"{size(min(each.shm_bytes or 0 for each in known))} free in /dev/shm")
    room = [each.memory_bytes for each in facts if each.memory_bytes is not None]
    if room:
        yield ok("memory", f"{size(min(room))} of main memory free")


def clocks(offsets: Sequence[tuple[float, float]], hosts: Sequence[str], most_s: float) -> list[Finding]:
    """offsets: of each rank's clock to rank 0's, and by how much that may be wrong; seconds."""
    middle = sorted(offset for offset, _ in offsets)[(len(offsets) - 1) // 2]
    found = []
    for (value, ranks), error in (
        (pair, max(offsets[rank][1] for rank in pair[1]))
        for pair in by_value(offsets, lambda each: round(each[0] - middle, 1)).items()
    ):
        if abs(value) - error > most_s:
            way = "ahead of" if value > 0 else "behind"
            found.append(
                off(
                    "clocks",
                    f"the clock of {who(ranks, hosts)} is {abs(value):.1f} s {way} most",
                    "Have the machines keep time (chronyc makestep; systemctl status chronyd): logs of several "
                    "machines are compared by it",
                )
            )
    spread = max(offset for offset, _ in offsets) - min(offset for offset, _ in offsets)
    if not found and len(offsets) > 1:
        found.append(ok("clocks", f"within {1000 * spread:.3g} ms of each other"))
    return found


def space(free: Sequence[int | None], hosts: Sequence[str], needed: int) -> list[Finding]:
    """free: bytes in the folder, as each rank sees it; None where it cannot."""
    short = [rank for rank, each in enumerate(free) if each is not None and each < needed]
    if short:
        return [
            off(
                "space",
                f"{size(free[short[0]] or 0)} are free in the folder, {size(needed)} are needed: {who(short, hosts)}",
                "Free some (autopar checkpoint prune RUN --keep 1), or save elsewhere",
            )
        ]
    known = [each for each in free if each is not None]
    return [ok("space", f"{size(min(known))} free in the folder")] if known else []


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _all(facts: Sequence[Facts]) -> str:
    return "this process" if len(facts) == 1 else f"all {len(facts)} ranks"


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)
