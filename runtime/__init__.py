"""What runs a generated program under torchrun: loading, parameters, steps, checks; and all ranks of one in a process.

`loader.py` makes functions of the text, `comm.py` and `communicator.py` move tensors, `ring.py` and `tiles.py` go round
a ring, `step.py` is a node of the user's autograd graph, `module.py` makes parameters DTensors under their names,
`executable.py` and `engine.py` hold what runs, `plain.py` a step on plain tensors, `stage.py`, `pipeline.py` and
`p2p.py` a pipeline, `checks.py`, `dry_run.py` and `order.py` compare ranks before the first step, `agreement.py` at
every forward, `nearby.py` has sockets for small messages on one machine, `checker/` gives every value of a program a
type, `simulate.py`, `simulate_pipeline.py` and `simulated_comm.py` run all ranks as threads, `optimizers.py`,
`local_update.py` and `clipping.py` take the step's end, `checkpoint/` saves and loads, `weights.py` initializes,
`kernels/` are Triton's.
`autopar/runtime` is a link to this folder. What users' scripts do around the step: `seen_whole.py` (outputs),
`state.py` (states in eager's words), `hooks.py`, `whole_update.py` (optimizers that look at whole tensors),
`meeting.py` (what one rank must not do alone).

**A DTensor where it is asked for, a whole tensor where it is not.** Outputs in pieces and what `state_dict()` gives are
DTensors of a class whose torch functions get the whole tensor: a script in eager's words runs, gathering where it
looks, and who knows of pieces (torch.distributed.checkpoint, `.to_local()`, operators with other DTensors) gets them.
Gradients of what was gathered are cut again, so that a loss of the user's own is one loss of the global batch. Before
the first gather of a kind the ranks meet in the job's store, as a rank that came alone would wait for ever.

**Ranks are simulated by threads** with a communicator that meets at each collective: the file that runs under torchrun
is the file that is proven, and ranks that issue different collectives are found at once.

**A pipeline at run time.** torch's `_PipelineScheduleRuntime` runs a rank's row of actions; what they do is ours
(`stage.py`, one object a stage and step, holds values from the action that makes them to the last that uses them;
`pipeline.py`). Messages (`p2p.py`) carry tensors and nothing else, so that both sides must agree: before the first step
every rank runs dry, and what each sends is compared with what its peer receives (`order.py`). Every rank has the whole
batch's labels, so all know which microbatches count, and leave the others' backwards out without asking. A rank holds
its stages' parameters, DTensors on the mesh of a stage (`comm.within`); buffers, small, are on all, and new ones are
sent to all after a step, as scalar outputs are. Copies of a tied parameter exchange gradients and add them in rank
order: equal bit for bit.

**Buffers that `forward` changes** are results of the program (`Program.updates`): they are copied after a forward.
Each microbatch sees them as the step found them, and what it makes of them is put together as outputs are: a counter
counts steps, a mean of the batch is that of all its rows.

**Elementwise optimizers step on local tensors** (`local_update.py`): the same numbers without DTensor's dispatch, which
costs as much as the arithmetic of a small tensor. The user's optimizer is not written to before its step has ended.
Those that look at whole matrices, means or norms step on whole tensors, on every rank (`whole_update.py`).
"""
