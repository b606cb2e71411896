"""A program cut into the stages of a pipeline: `recompute` says which values a later stage computes again, and which
travel.

**`separate`.** Values that no parameter goes into are made by calls of their own, so that a stage can make them again.
It runs where there is a pipeline only: without one nothing is gained.
"""
