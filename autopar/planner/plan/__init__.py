"""A plan as data: `record` (`PlanRecord`: every decision and its predicted cost), `decisions` (a placement as plain
data, and back onto a program that was traced again), `drawn` (`Views`: what pictures, reports and traces show),
`json` and `packed` (its file).

**A plan file holds data only.** Loading one never runs code; the program's text is written from it afresh, unless the
user hands in an edited one. Decisions are kept by the names of values (`passes/name_values.py`); a model that traces
otherwise is refused, and so is a file whose checksum differs. What is drawn is saved too, so a loaded plan draws what a
fresh one does.
"""
