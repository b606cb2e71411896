"""The one place that imports torch's private or version-dependent parts; each import says what needs it and why.

`tracing.py` serves capture and differentiation, `distributed.py` the runtime, `pipelining.py` schedules and their
runtime (it speaks the text of actions, not our `Action`), `compiling.py` torch.compile, `frames.py` whoever names the
model's own lines. Tested on torch 2.11 and 2.13.

**One thread traces at a time** (`tracing.exclusive`), and what torch sets for the process meanwhile (compiling flags,
mkldnn, cudnn, `nn.Module.__call__`) stays torch's.

**torch's `_StridedShard`** gathered wrongly where two axes split one dim (11 of 61 layouts on a 2 × 2 mesh in 2.13,
without a word), and checkpoints of it were corrupt. `distributed.py` mends both, and a test holds it to that.
"""
