"""What is tried, in which order, until something fits: from a user's words to a `PlanRecord`.

`decide.py` is the way in, `inputs.py` binds the batch, `planning.py` goes from a request to its plan, `attempts.py`
says what is tried and why (read it first), `candidates.py` lists the names that `auto` is held against, `programs.py`
keeps what a trace becomes on the way, `assembly.py` puts the record together, `price.py` says what a lowered program
costs, `bounds.py` what is proven of it, `microbatches.py` finds their number for a pipeline, `least_memory.py` what
memory one would need, `plan_cache.py` keeps plans on disk by content,
`family.py` lowers one plan's decisions for batches of other sizes (`sizes.py`: where the model does the same).
`plan/` is the record, `search/` compares meshes.

**`auto` is never slower than a name.** It is placed in every mode of recomputation in which computing alone does not
take longer than what was found, and then compared with every named strategy, each in the first mode in which it fits
(`attempts.py`): that is what the user would get by its name. A named strategy's decisions that are predicted faster
are taken; the bound and gap printed stay those of the problem of `auto` in that mode, and a note says what its
objective charges for them (`passes/placement/choices.py`). Context parallelism is tried where `cost/context.py` says
that it could be faster.

**A named strategy's layouts do not depend on what is recomputed.** Placed anew, Llama's first norm under
`tensor+sequence` and `selective` was computed whole on every rank: that saves an all-gather a layer in the backward (2%
to 5% of a step) and keeps a whole hidden state a layer, which is what the strategy is to split. So named strategies are
placed without recomputing first, and what is recomputed follows (`passes/placement/narrow.py`). The printed gap is that
of what is then left to decide. `auto` weighs the two.

**Memory that does not fit is asked for less.** A placement is held against its own timeline, the lowered program is
walked (`cost/memory`), and where the walk says too much, or leaves much, the placement is asked again with another
limit, a few times.
"""
