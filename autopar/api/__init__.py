"""What a user calls, and nothing that decides.

`compile.py` plans on rank 0, broadcasts, and hands the model to the runtime; `planning.py` is `autopar.plan`: the
planner's `PlanRecord`, dressed into a `Plan` (`plan.py`) with its program's text, what is drawn of it, and words about
attention; `search.py` is `autopar.search`. `backend.py` and `subgraph.py` are the other way in, `torch.compile(model,
backend=autopar.backend(mesh))`: each graph that Dynamo traced is made a model again, its parameters pinned whole.
`proof.py` runs a program for all ranks in one process beside the eager model (`promote.py` keeps both in one type),
`interpret.py` runs the IR of any phase before lowering.

**Verbs live here, data in the planner.** Everything below takes the record; `Plan` adds verify, explain, trace, holds,
report, visualize, save, load and print, each of which lives in the room that does the work. Records that are only
compared are never dressed: text and views take time.

**The proof is in float64, casts included.** Sums in another order differ by rounding, and Llama's norms cast to
float32, so even a float64 model rounds. `promote.py` reads every narrower type that the model's code names as float64;
what then differs is an error.
"""
