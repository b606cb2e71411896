"""Requests that come and go over one batch of fixed rows (*slots*), each with the tokens that `generate()` of it alone
would make.

    requests ─ first come, first served ─► prompts, packed, a chunk at a time ─► keys moved into the rows of slots
                                                                                          │
                 finished requests ◄── one token for all slots, as generate() makes it ◄──┘

A cache has one number of written positions for all of its rows. So the newest token of every row stands in the same
column, and a request in a row is what a prompt with padding on its left is in `generate()`: the mask leaves out what is
left of where it begins, windows see distances, and positions are its own. The program of a token is that of
`generate()`, therefore; nothing in it knows of slots. Where the columns end, all rows move to the left by as much as
none of them needs.

Prompts do not wait for each other's lengths: they stand one behind the other in a row of another cache (*lane*), and
the mask lets each see itself alone. Its keys are then copied into the slot. A lane serves the slots of the ranks that
it lies on: where rows are split there are as many lanes as pieces, and nothing is sent.
"""
