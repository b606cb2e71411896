"""`autopar.search`: the meshes, strategies, schedules and microbatches of a cluster, compared by predicted cost.

cluster ─ candidates ─► estimated (one trace, a placement a family of strategies, formulas over the rest)
─► the best of them planned ─► SearchResult
"""
