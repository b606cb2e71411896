"""What may be asked of a mesh axis: strategies by name, alone or in products, pins, and what a pipeline is to be.

`axis.py` has the constraint sets behind the names, one `AxisStrategy` each, `names.py` finds, parses and resolves them,
`context.py` those that split the sequence (`Spread`: the programs that they need), `request.py` is all that a user
asked, `pipelining/` schedules. `autopar.strategies` is the public name; its parts are imported from their own files by
everything else here.

**Named strategies are constraints**, not code paths: they say how the inputs lie, which parameter modes are allowed or
required, and which collectives activations may use. The solver finds Megatron's columns and rows itself. `auto` has no
constraints; how it is held against the names is the planner's.

**Four modes for a parameter on an axis**: *replicate*; *shard* (operators work on the piece: tensor parallelism);
*gather* (a piece is stored, the whole is gathered for each use and freed: ZeRO-3); *keep* (gathered at its first use in
a step, and held until the last: ZeRO-1, ZeRO-2). A parameter has a stored, a held, a compute and a gradient sharding;
which of them differ is all that tells the data-parallel strategies apart. States need no code: they are the
optimizer's, on the stored pieces.

**Named strategies count bytes, not latencies, and memory does not bend them.** The literature states volumes; on a
small model latency would make `tensor+sequence` something else. Until the last mode of recomputation, the memory limit
decides what is computed again, not where things lie. `auto` weighs everything.

**Context parallelism is a constraint on attention** (`context.py`, `passes/placement/context.py`): the hidden state is
split along the sequence, attention's choice on the axis is pinned to heads, queries or ring, and only what attention
reads and gives may be moved, by the collectives of that name. So nothing else is left to the solver but parameters and
zigzag. Without the pin it would gather the hidden state where that is less than keys and values, which is not what the
name says. Named, the memory limit takes part in the placement from the start: it decides how parameters lie, and cannot
bend what activations send. `auto` has all choices anyhow; what it lacks are the prepared programs (`Spread`), which
`planner/attempts.py` tries where `cost/context.py` says that they could be faster.
"""

from autopar.strategies.names import *  # noqa: F403 (what `names` says is public)
from autopar.strategies.names import __all__ as __all__
