"""The placement problem: built from an annotated program, read back into it. `autopar.passes.place` drives it."""
