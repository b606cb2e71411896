"""What a program runs on: `Mesh` (named axes, from the slowest link to the fastest), `Hardware` (what one device
computes, moves and holds), `Link` (what carries a collective over an axis), `curves.py` (what fraction of the peak a
size reaches).

`profiles.py` reads the TOML of `data/hardware`, checks every number and names the wrong one; `hardware_data.py` puts a
profile into a plan's file, so that a plan says on what it was made; `data/links.toml` is the catalogue of `links.py`.
Each number of a shipped profile has its `source`; `cost/calibration` makes profiles of machines at hand.

**An axis is a link.** The order of axes is that of their speed, and whatever prices or orders moves
(`ir/redistribution.py`) relies on it.
"""
