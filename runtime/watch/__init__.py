"""Watching a run of weeks: what may go wrong without an error, found at the step and named with its rank.

`watching.py` is what `autopar.watch` gives, `verdicts.py` says what is to be done about a loss or a norm, `replicas.py`
compares what ranks hold alike; `late.py` names ranks that are waited for, by what all say through the job's store,
`slow.py` those that take a little longer in every step.

**The loop stays as it is.** autopar is asked before every step of an optimizer anyway (`runtime/module.py`); the watch
is asked there. A step is skipped by leaving it no gradients, so that the optimizer itself, whichever it is, changes
neither parameters nor states nor counters.

**All ranks decide from the same numbers**: each sends its own, and what follows is computed from all of them alike.
"""
