"""The text of a generated program: statements, region functions, and the loops over calls. `autopar.passes.emit` drives
it.

`functions` and `parameters` write a region (gather, forward, backward, its halves, reduce), `statements` a line an
operator, `names` the variables and what is written where it is used, `headings` the modules and source lines, `sizes`
the sizes that have names (B, S, H, …), `steps`, `backward` and `segments` the step, `stages`, `stage_table` and
`stage_interface` a pipeline.

**One program text.** What is emitted is what runs, not something beside it; `plan.source` is text, and a person is to
read it. Stages that differ only in the numbers of their blocks share their functions, so the text does not grow with
their number; no text depends on the rank.
"""
