"""Pipelines as plain data: `spec` (what a user asks), `asked` and `schedules` (the orders of known schedules, and of a
CSV), `greedy`, `check` (whether one runs to its end), `costs` (`StageCost`), `simulate` (`Timeline`), `cut`, `best`,
`summary`, `trace`. `Schedule` and `Action` are in `ir/schedule.py`.

**Schedules are torch's, as data.** Orders of computations come from torch's classes, sends and receives from its
`_add_send_recv`, and its schedule runtime runs them, on stage objects whose messages are ours: so the same runtime runs
in real processes and in the proof's threads. `1f1b` is ours: torch 2.13's order leaves microbatch 0 out on the last
rank; so is `greedy`, which lists what can start next by what stages take and ranks may hold.

**What is simulated** is each rank's list of actions, one after the other, with messages that take latency and bytes,
and gathers and reductions beside the computations. It is neither the formula for a bubble nor a time per step alone: a
schedule that would be faster but holds too much is passed over because its own memory over time says so.

**A pipeline is cut after placement.** One placement serves all stages: blocks of one region lie alike whichever stage
they are on, so the solver's problem is that of one stage's mesh (`Mesh.without("pp")`), with an equal part of the model
as its memory. Once lowered, calls have costs and bytes that are those of what runs, and the cut, the schedule and the
number of microbatches are chosen with them. Where the fullest stage then does not fit, the placement is asked for less.
"""
