"""Whether a generated program, edited or not, computes what one device would: every value gets a type.

    f32[8/dp, 32, 64] +tp      rows of a whole tensor of 8 × 32 × 64, of which the ranks of `tp` hold terms

The text is run without peers on meta tensors, and each of its statements is asked what whole operation it is a part of
(`infer.py`, `part.py`): an operator whose sharding rule says that pieces like these, with arguments like these, give
pieces of its result. A collective says itself what it takes and gives (`moves.py`). What comes in and goes out is
typed by the program's interface (`program.py`). A statement for which there is no whole operation is refused: a term
used as if it were the value, a sum over an axis on which there are no terms, or none where there are, a piece taken
for the whole, an offset of another rank, a gradient that is not stored as it is returned. Neither placement nor
lowering, which wrote the text, nor the comments in it are asked.

A tensor may have several types at once, all of them true: eight heads of sixteen are also one of a hundred and
twenty-eight. What follows from one of them is true.
"""
