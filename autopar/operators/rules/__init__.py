"""Sharding rules: one per operator, as factors. `lookup` finds the rule of a call: registered (`registry`, and one file
a kind of operator), known from its tags, discovered by running it (`discover`), or none. `verify` proves a rule by
execution.

**Rules are factors.** `mm` is `m k, k n -> m n | k sum`. From one line follow all strategies, what is partial, and the
lowering, for any number of axes. A rule that is wrong is found by running it on split operands (`verify.py`), and an
operator without one gets it the same way (`discover.py`), or is replicated with a warning.

**Heads that do not divide.** Grouped heads are `(h r)`: r query heads for each of h key heads. An axis may split h, or
r, or, where it divides only the product, `(h r)` as one: query heads in contiguous runs, keys whole, the gradients of
keys terms of a sum. Keys' projections are then computed on every rank, which is KV replication; it costs their compute,
and the reduction of their weights' gradients. Repeated keys (`repeat_kv`) are taken back to the heads themselves first
(`passes/group_heads.py`), so they are neither made nor kept.

**Rings.** `| s ring t 1 2` in a rule: one axis splits the queries `s` and the keys `t` at once, because operands 1 and
2, and their gradients, go round (`Ring` in `ir/rule.py`). The operator becomes one call, `comm.ring_attention(…)`, of
`runtime/ring.py`: blocks travel while others are computed, and of a block only those tiles are computed that somebody
sees (`runtime/tiles.py`). A block goes only to ranks that see any of it (`visits=`), so a window that reaches the
neighbour sends one block, not n - 1. The text says it, so all ranks agree, and the plan's bytes are those sent. A rank
with less to see waits: pairs are counted run by run (`attention_cost.py`), the ring is followed step by step, and what
computing does not hide is charged (`cost/rings.py`). The proof of a rule lets every rank see all blocks at once; that
blocks merge is for the runtime's tests.
"""

from autopar.ir.choices import Choice, Offset, Positions, Starts, axis_choices, local_sizes, localize, shardings
from autopar.ir.op_call import OpCall, TensorSpec, op_call
from autopar.ir.rule import Factor, Rule, format_rule, parse_rule
from autopar.operators.rules.lookup import registered, rule_for
from autopar.operators.rules.registry import rule

__all__ = [
    "Choice", "Factor", "Offset", "OpCall", "Positions", "Rule", "Starts", "TensorSpec", "axis_choices",
    "format_rule", "local_sizes", "localize", "op_call", "parse_rule", "registered", "rule", "rule_for", "shardings",
]  # fmt: skip
