"""The text of a generated program: statements, region functions, and the loops over calls. `autopar.passes.emit` drives
it.
"""
