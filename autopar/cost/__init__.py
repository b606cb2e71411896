"""Seconds and bytes of a program (docs/cost.md has the formulas and where they come from).

From small to large: `roofline.py` (`Work`: FLOPs, bytes and local m, n, k of one operator on one rank; what it and a
collective take), `local_work.py` (from a rule and a strategy to `Work`), `fusion.py` (what a compiler makes one
kernel), `operator_time.py`, `rings.py`, `collectives.py` (every collective of a lowered program), `call_times.py` and
`step_time.py` (the step, with what runs beside the compute), `accumulation.py`, `context.py` (what splitting the
sequence could gain at best, before anything is placed), `estimate.py` (`Cost`, `Memory`). `memory/` walks what is held,
`calibration/` measures a machine.

**What is predicted is what runs**: collectives, ring messages and bytes are read off the lowered graphs, not off the
decisions that led to them. Tables by size are pure functions of sizes and a `Hardware`; nothing here is timed but in
`calibration/`.

**Objective and estimate differ, and say so.** The objective of placement is a sum over operators and moves: it charges
a latency a parameter, where a bucket pays one. Named strategies are compared by the estimate.
"""
