"""How the values of a program depend on the rows of its batch; `autopar.passes.batching` drives it.

**Microbatches are data parallelism in time.** How outputs depend on the rows of the batch is analysed on the captured
graph with the same rules that shard it (`passes/batching.py`): a loss is a sum, a mean, or an average weighted by a
count that depends on inputs only; or it is made a sum or a mean by what is known of the whole batch before microbatches
run (`of_batch.py`), or microbatches are refused. Two captures, at two batch sizes, tell what Python made
of the number of rows.
"""
