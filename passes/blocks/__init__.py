"""Blocks that a model repeats: traced once, and of a long row of them a few in the graph.

`trace` has the order, `alike` says when one block repeats another, `recording` notes what a forward reads,
`attributes` hands on what it sets, `hollow` stands in for what is not traced, `marks` mark blocks in a graph, `fold`
and `write` leave rows out and write calls out, `words` notes what a block's forward calls what it is given.

**What a forward reads decides.** A block is like the first where all that the first one's forward read of its modules
(attributes, classes, shapes), and what it is called with, is the same. What forward has set on a block's modules since
it began goes in and comes out as arguments and results do. Whatever that cannot tell (hooks, views of inputs, changes
in place) is traced whole; tests hold both ways against each other. Blocks that will likely repeat are not even shown to
the tracer, which handles every parameter several times; where the model looks for tensors inside of them, or lists what
is there, it is traced again with all shown.

**No class is touched.** Attributes that differ between blocks are put aside in the copy's own dictionaries
(`recording`), so a user's other threads, and models that share a class, see nothing; one thread traces at a time.

**Long rows are folded.** Where every block reads what the one a period before it reads, shifted, two periods stay in
the captured graph and the others are counted; comparing the two tells what moves along. 94 layers more of a Llama 405B
take 0.3 CPU s, most of it one call a layer in torch.export, where they took 2.1. Nothing between capture and outline
may treat two equal blocks differently; the tests hold folded and whole programs, texts and all, against each other.
"""
