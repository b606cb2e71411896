"""What a rank holds: `regions` (one phase of a region), `calls` (what each call takes and leaves), `stages` (a stage of
a pipeline, from its calls), `step` (the peak of a step without one, walked call by call), `buckets` and `boundaries`
(what travels together, and between stages).

**The plan's peak is walked, not the placement's.** Placement checks its limit on a timeline that counts gradients whole
over the whole step, up to 25% high for `ddp`; what is printed, and decides whether a plan fits, is the walk over the
lowered graphs. What stages take is read off a program that `overlap` has been through: their caller runs it.
"""
