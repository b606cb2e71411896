"""Timeline and memory of the sample: a 1F1B schedule, simulated."""

from __future__ import annotations

from typing import Any

KINDS = {
    "forward": "forward",
    "backward": "backward",
    "send": "send to another stage",
    "gather": "gather of parameters",
    "reduce": "reduction of gradients",
    "optimizer": "optimizer",
}


def timeline(num_ranks: int, num_events: int, step_s: float) -> dict[str, Any]:
    """1F1B on `num_ranks` stages with as many microbatches as give about `num_events` events a rank."""
    num_microbatches = max(num_ranks, num_events // 5)
    ends, spans = _one_f_one_b(num_ranks, num_microbatches)
    scale = step_s * 0.97 / max(stop for _, stop in ends.values())
    ranks, arrows = [], []
    for rank in range(num_ranks):
        compute, network, parameters = [], [], []
        for kind, number, start, stop in spans[rank]:
            item = "op:layer.linear_0" if kind == "forward" else None
            compute.append([start * scale, (stop - start) * scale, f"{number}{kind[0].upper()}", kind, item])
            parameters.append(
                [start * scale, 0.3 * scale, f"gather layer, microbatch {number}", "gather", "op:layer.all_gather_8"]
            )
            target = rank + (1 if kind == "forward" else -1)
            if 0 <= target < num_ranks:
                network.append([stop * scale, 0.1 * scale, f"send {number} to stage {target}", "send", None])
                if number % 8 == 0:
                    arrows.append([rank, stop * scale, target, (stop + 0.1) * scale])
        compute.append([step_s * 0.975, step_s * 0.02, "optimizer", "optimizer", None])
        busy = sum(event[1] for event in compute)
        tracks = [
            {"name": "compute", "events": compute},
            {"name": "parameters", "events": parameters},
            {"name": "network", "events": network},
        ]
        ranks.append({"name": f"stage {rank}", "bubble": 1 - busy / step_s, "tracks": tracks})
    return {"ranks": ranks, "arrows": arrows, "step_s": step_s, "kinds": KINDS}


def _one_f_one_b(num_ranks: int, num_microbatches: int) -> tuple[dict[Any, Any], list[list[Any]]]:
    orders = []
    for rank in range(num_ranks):
        warm = min(num_microbatches, num_ranks - rank)
        order = [("forward", number) for number in range(warm)]
        for number in range(num_microbatches):
            order.append(("backward", number))
            if number + warm < num_microbatches:
                order.append(("forward", number + warm))
        orders.append(order)
    ends: dict[Any, Any] = {}
    free = [0.0] * num_ranks
    spans: list[list[Any]] = [[] for _ in range(num_ranks)]
    done = [0] * num_ranks
    while any(done[rank] < len(orders[rank]) for rank in range(num_ranks)):
        for rank in range(num_ranks):
            while done[rank] < len(orders[rank]):
                kind, number = orders[rank][done[rank]]
                before = (kind, number, rank - 1) if kind == "forward" else (kind, number, rank + 1)
                if 0 <= before[2] < num_ranks and before not in ends:
                    break
                start = max(free[rank], ends.get(before, (0, 0))[1])
                stop = start + (1.0 if kind == "forward" else 2.0)
                ends[kind, number, rank] = (start, stop)
                free[rank] = stop
                spans[rank].append((kind, number, start, stop))
                done[rank] += 1
    return ends, spans


def memory(rank: int, num_ranks: int) -> dict[str, Any]:
    """Activations that pile up while the pipeline fills, and go as it drains."""
    gib = 2**30
    in_flight = num_ranks - rank
    times, held = [], []
    for number in range(96):
        times.append(number * 7.52 / 96)
        held.append(min(number + 1, in_flight, 96 - number) + (0.5 if number % 2 else 0))
    flat = len(times)
    series = {
        "parameters": [6.2 * gib] * flat,
        "optimizer states": [12.3 * gib] * flat,
        "gradients": [(2.0 if index < in_flight else 11.8) * gib for index in range(flat)],
        "activations": [1.703 * count * gib for count in held],
        "gathered": [(3.1 if index % 2 else 1.5) * gib for index in range(flat)],
    }
    peak = max(sum(values[index] for values in series.values()) for index in range(flat))
    return {"name": f"stage {rank}", "rank": rank, "times_s": times, "series": series, "peak_bytes": int(peak)}
