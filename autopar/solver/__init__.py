"""The placement solver: one choice per node, pairwise costs, a limit on memory over time. Plain data in and out; knows
nothing of torch.

`problem.py` (`AssignmentProblem`, `Solution`), `solve.py` (the way through), `methods.py` (which method searches a
graph, by its size: one table, the only place where sizes decide), `presolve.py`, `messages.py`, `prices.py`,
`buckets.py`, `fixing.py`, `pool.py`, `exact.py`; `compiled*.py` are loops for numba; `large/` is for graphs of
thousands of edges.

**How.** Message passing on the graph of operators gives a solution and a lower bound; memory rows enter as prices;
reduced costs fix most choices; an integer program (OR-Tools MathOpt) closes what is left. The gap printed is proven.
Where few values cross from one block to the next, all can be eliminated exactly (`buckets.py`): a table over the
neighbours of each operator. Sizes of tables are known beforehand (`methods.py`): up to 2·10⁷ cells, which is every
named strategy, they take the place of messages where no memory is priced; up to 10⁹, a second or three, they are asked
once, where memory costs nothing and messages converge slowly. Long chains of many small operators are of that kind: a
bottleneck of ResNet-50 is some 120 variables of two microseconds each, so hardly a choice can be fixed by what it
costs, messages left a gap of 5% after six seconds, and both the bound and the answer were 2.4% off. What makes its
tables small enough is that choices dominate others once their neighbours are eliminated. A memory limit that no choice
can reach is left out before anything else, and one round of presolve has to do there. Integer programs are asked for a
gap of 0.8% (`proof_gap`): below that they only proved what was known, for ten times the time of the rest. Seconds of
gathers and reductions count `overlap_price` in the objective (docs/cost.md).

Messages *run ahead* (`messages.py`): each step begins from where the last change would lead (Nesterov's momentum, begun
anew when the bound falls). Sweeps alone creep where many choices are nearly alike: BERT-base on four axes has no gap
between bound and optimum, and sweeps needed 630 passes to show it, with momentum 60. Compiled messages keep their
momentum when prices change: what they were on the way to is still most of what is missing.

*Settled messages.* Where no memory is priced, compiled passes go on until the bound stands still, not only until it
rises little. RWKV's unrolled steps (6,000 edges in the core, a pass of 5 ms) had a bound within 0.001% of the optimum
after 80 passes, and nothing better than 1.1% above it; after 96 all messages agreed, and rounded to the optimum. Pools,
dives and programs took six seconds, and did not find it. MobileViTV2's gaps of 0.7% and 1.6% went the same way. Tables
of more than 2·10⁷ cells are planned only where that leaves a gap. Within 1% nothing follows on messages that stand
still: pool, dives and programs took SLANet's search (0.83%) another three seconds, which the clock ended, for nothing.

*Graphs of mid size* (500 edges or 5 million pairs of choices in the core: ResNet-50, and every transformer on four
axes) are worked on whole, not eliminated, by loops that numba compiles (`compiled.py`, `compiled_moves.py`; plain
Python, and slow, where it is missing). ResNet-50's core takes 30 ms a pass in numpy, 1.4 ms compiled, so that some
dozens of memory prices fit where three did. The loops are compiled, or read from disk, before the clock of the search
starts.

*Lumpy memory* (`branching.py`): where a few large tensors decide what fits, the best prices leave a gap that no price
closes (7% of the small CNN with 80% of its memory). Branch and bound splits a node where cheap answers differ in priced
bytes; each half has prices of its own. That CNN is within 0.6% after 1.2 s, where the integer program took 28, and
Llama-8B on dp=8,tp=4 at 80% got 0.4% cheaper. *Dives* search the few choices within 0.03%, 0.3% and 3% of the bound of
graphs of mid size: what rounds badly among all rounds well among few (CLIP on four axes: 19% over the bound before,
less than 0.1% after), and what is left out costs more than that, which is a bound.

*Where a pass takes long* (20 million pairs or more; `narrowing.py`) there is no time for hundreds of them. A few say
what each choice would add to the bound. Those that would add least, at several guesses of the price, with 2% of the
pairs between them, are solved by themselves (`parts.py`); their prices are tried on all choices, whose messages go on,
and so on until prices settle. What is left out can make a price wrong, never a bound. On four axes with 80% of the
memory, ResNet-50's gap of 34% became 0.1% and T5-3B's of 32% 0.02%, within the same time limit. Bringing the few's
messages back to all did not work: choices that the few do not have undercut them, and the bound fell to a half.

Presolve compares each choice with a few rivals for every choice of the neighbours; a sample of 16 of these rules most
comparisons out (T5-3B on four axes, 420 million pairs: 6 s where it took 22). Where memory is seen to bind after a
dozen sweeps, prices are begun with; more sweeps without them say nothing of what is sought.

`python benchmarks/solver/iopddl.py FOLDER [--write]` runs the solver alone on published problems that are not ours: the
shardings from XLA of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism (github.com/google/iopddl),
against the lowest costs of its teams. Every answer is added up from the file (`iopddl_file.py`), so a bug of the solver
cannot flatter the table. `iopddl.py FILE` prints one answer and its progress.
"""

from autopar.solver.problem import AssignmentProblem, Conflict, Edge, Node, Solution, Usage
from autopar.solver.solve import PeakResult, minimum_peak, solve

__all__ = ["AssignmentProblem", "Conflict", "Edge", "Node", "PeakResult", "Solution", "Usage", "minimum_peak", "solve"]
