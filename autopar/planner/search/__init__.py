"""`autopar.search`: the meshes, strategies, schedules and microbatches of a cluster, compared by predicted cost.

cluster ─ candidates ─► estimated (one trace, a placement a family of strategies, formulas over the rest)
─► the best of them planned ─► SearchResult

`space.py` enumerates, `families.py` places families of strategies on a small mesh, `estimates.py` prices them on
others, `layouts.py` says where data strategies leave parameters, `stages.py` cuts and adds up stages, `formulas.py` has
the schedules, `compare.py` and `worth.py` leave out what cannot win, `run.py` plans the best (docs/search.md).

**Sizes are put in, not solved for.** Costs as sympy expressions over batch, sequence and axis sizes would have to carry
what is no expression: which kernel a product takes, whether a size divides, how a link is shared. Operators' strategies
are loop indices, so what was placed once is priced for other sizes by putting them in, in vectors here; only what a
schedule takes is sympy, compiled to numpy. Neither mesh nor microbatches are traced for again in a search; another
sequence length is another trace, which takes a second.
"""
