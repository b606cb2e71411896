"""The placement problem: built from an annotated program, read back into it. `autopar.passes.place` drives it.

`problem` builds it of `parts`: operators' choices, `values` between calls, `parameters`, `layouts` that a tensor may
have, `moves` between them, the `timeline`; `narrow` and `choices` take another placement's decisions over, `conceding`
what it was let off, `context` is attention under strategies that split the sequence, `explain` says why there is no
placement.

**Relays.** Where several operators read a value, a variable of its own says in which sharding it is moved once for all
of them, and kept for the backward. Without it the objective charged a move once per reader: it overlooked plans, and
reduced twice what had been reduced once.

**The folded timeline.** Memory is checked at every time of the step, but a repeated region takes one stretch of the
timeline: what it saves for the backward counts once per call, because by its last call all have saved theirs
(`timeline.py`).

*What the problem is built from.* Seconds of every move between two layouts are asked for all pairs of two lists
(`moves.py`). What a move takes depends on which splits are of the same dim, not on which dim that is, so pairs are
named by patterns and each pattern is worked out once, by the rules that single pairs follow (`ir/redistribution.py`):
BERT-base on four axes has 17 million pairs in its tables, and building its problem took 8 to 10 CPU seconds where it
took 43. `place` gives the solver 6 CPU seconds and a quarter of a second for each million of pairs.

**Ties are left as they fall.** Breaking them by the number of messages was tried, and made seven models' plans up to 5%
slower on h100: what ties in the objective does not tie in the step, where buckets and overlap decide.
"""
