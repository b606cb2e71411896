"""What every room stands on, and what knows nothing of the rest.

`errors.py` has `AutoparError`: what was asked, where, the numbers, the remedy. `environment.py` reads all environment
variables, `progress.py` says what a long command is at, `text.py` formats words, sizes and times; `trace.py` and
`perfetto.py` are timelines as plain data, and as files for ui.perfetto.dev; `recent.py` keeps what was worked out last.
`torch_compat/` and `huggingface/` are the only doors to torch's private parts and to transformers.

**Caches are bounded.** `Recent` keeps the last values by what decides them, for the threads of a process, where
`functools.lru_cache` could not make a key of the arguments.

**The environment is read in one file**, so that what can change a run from outside is a list that one can read.
"""
