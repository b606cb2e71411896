"""Other people's training loops, with a compiled model in them. Imports what each is for, and is imported by nobody.

The loops know ranks that have data of their own, each with a copy of the model. The ranks of a compiled model are one
device together: every rank hands in the same batch and gets the same loss. `accelerate.py` says so to accelerate,
`transformers.py` to transformers' Trainer, which is built on it. What they offer to override is overridden, in
subclasses; nothing of theirs is patched.
"""
