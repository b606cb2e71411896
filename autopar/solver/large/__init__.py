"""What only graphs of thousands of edges need, and what time is left for; `autopar.solver.methods` says which.

*Large graphs* (3,000 edges or more in the core; `phases.py` has the order) are worked on whole, too. With thousands of
time points that bind, a master problem over choices seen does not get far: on instance K its price left 42% between
bound and answer after a minute. The volume algorithm (`volume.py`) sweeps twice and moves every price at once, some 7
ms a step, from an average of the profiles; its target is the cheapest known answer or a little over the bound, so that
no step is tuned. Then `annealing.py` searches: a node takes another choice, neighbours that this forbids, or that can
now do better, follow, and theirs, as one move; a tree of maxima over the time points says what each does to the peak.
Following only the forbidden left K 8% and U 6% over the contest's best after 40 s; with every eighth cascade following
what gains, too (and longer rounds), they were 1.6% over and 11% under it, from the same starts. An integer program then
combines the last hundred choices at the best prices with what was found (`solver/pool.py`), most of which do not fit
alone. How much that gives depends on how different they are: on M it took the cost from 0.32% over the contest's best
to 0.02% under it from a hundred with 29,000 pairs, to 0.29% over it from a later hundred with 6,000. The program begins
with memory rows of the hundred dearest points (K has thousands with a price: writing all their rows took longer than
solving). `solve(..., anytime=True)` spends what time is left on that, with exact programs over neighbourhoods beside it
(`neighbourhoods.py`). `solve(..., wall_clock=True)` counts wall clock and uses all cores; placement counts CPU seconds
and one core, so that its plans do not depend on the machine.
"""
