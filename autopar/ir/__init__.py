"""The program, and what it is made of; a pass takes one and gives a new one.

`program.py` (`Program`; opens with the grammar that it prints in), `region.py` (`Region`, `Call`), `values.py`,
`graphs.py` and `nodes.py` (what passes ask of a graph), `names.py`; `tensor_type.py`, `sharding.py` (`Shard`,
`Replicate`, `Partial`, `f32[8/dp, 64/tp] +tp`), `redistribution.py`, `uneven.py`, `positions.py`; `op_call.py`,
`rule.py` (`Rule`, `Factor`, the notation), `choices.py` (`Choice`: what an axis does with an operator, and the
shardings that follow); `classes.py`, `placement.py` (what `place` and `overlap` decide), `stages.py` and `schedule.py`
(`Pipeline`, `Stage`, `Schedule`, `Action`), `interface.py` (`ProgramInterface`: what the runtime must know of a
generated program), `verify.py` (what every program satisfies, phase by phase). All frozen: a pass copies the graphs
that it changes.

**Classes.** Values that calls connect must agree: the hidden state that each layer reads and writes is one class, its
gradient another, the parameters of one slot of all layers a third (`classes.py`). `place` decides one sharding per
class. This is what makes a solution for one layer a solution for all.

**Stripes.** A dim may be a product of factors, and a middle one may be the one to split: GPT-2's fused qkv is `(3 h
d)`, and Megatron splits `h`. `Shard(dim, outer=3)` says so: the dim is seen as (outer, rest) and `rest` is cut, so that
a rank holds 3 stripes. It is torch's `_StridedShard`, and prints as `192/3:tp`. Without it every fused model pays an
all-to-all a layer.

**Zigzag.** Under a causal mask later queries see more keys. `Shard(dim, outer=2, zigzag=True)` deals the stripes
forwards and backwards in turn, so that rank i of n holds chunks i and 2n-1-i of a sequence, and all ranks have equal
work; it prints as `128/2~cp`. It is offered on axes whose strategy asks for it, beginning at operators that can be told
where the runs of their elements begin (`Rule.starts_args`, `comm.starts`), and spreads as stripes do: rows that join
batch and sequence are zigzag in 2b stripes, of the b rows that axes before it leave (`AxisStrategy.sequence`). DTensor
has no word for it: parameters, gradients and outputs never lie so, and the move back is part of the plan.

**Slow axes inside fast ones.** Mesh axes are ordered from slow links to fast ones. A parameter that two axes store in
pieces of one dim and gather may lie with the first axis's pieces inside the other's, `(S(0, outer=8), S(0))` on
`node=8,dp=8`: then a rank's own piece is gathered over `node` first, an eighth of what it would be after `dp`, and `dp`
carries the rest; gradients are scattered over `dp` first. Contiguous pieces `(S(0), S(0))` allow the opposite order
only. Both are choices (`passes/placement/layouts.py`), and costs decide; redistributions gather over first axes first
and scatter over them last. Llama 3.1 8B under `zero3` on eight nodes of eight H100 sends 5.3 GB a rank and step between
nodes instead of 42 GB, and takes 0.49 s instead of 0.98.

**The steps between two shardings are said once** (`redistribution.py`), for one pair and for arrays of pairs: what the
runtime follows and the table of what every move costs are made of the same rules.

**Uneven pieces.** Where pieces are uneven, the program of every rank deals in blocks of one shape; the runtime pads
short pieces with zeros and trims what comes out (`uneven.py`). So no text depends on the rank.
"""
