"""Blocks that a model repeats: traced once, and of a long row of them a few in the graph."""
