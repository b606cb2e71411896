"""Why so? `explain` pins every other sharding of a tensor in turn and has the whole placement solved again.

`subjects` finds what a name stands for and the shardings it could have, `exclusions` drops what sizes, pins and
strategies forbid, `attention_choices` and `attention_axes` put what axes do to attention in words (for `print(plan)`
too), `alternatives` solves the placement again, `attribution` finds the collectives that are due to a tensor,
`breakdown` says what a step is made of, `memory_price` what a byte costs, `explanation` holds the answer and prints it.

**An explanation is a solution, not a story**: what an alternative would cost is the cost of the best placement that has
it, or the constraint that excludes it by name.
"""
