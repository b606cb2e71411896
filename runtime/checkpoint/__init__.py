"""Checkpoints: a run's state out, in, onto any mesh; and safetensors of others.

    folder/step-000001000/manifest.json               what is where: boxes of tensors, sizes, hashes; plain data
    folder/step-000001000/model-00003.safetensors     what rank 3 wrote of parameters and buffers, under their names
    folder/step-000001000/state-00003.safetensors     of optimizers' states and other tensors

`boxes.py` is the geometry: which pieces of a tensor meet, and whether pieces cover it once. `tree.py` makes JSON of
plain data with tensors in it. `manifest.py` is the manifest, written and read; `folders.py` the folder of steps, its
commits by one rename, its lock. `blocks.py` writes and reads files, hashing as it goes. `contents.py` says what a rank
holds of a model and its optimizers; `saving.py` and `loading.py` are what all ranks do together; `writing.py` is what a
rank does by itself, in a thread (`background.py`, from a copy: `snapshot.py`) where training does not wait.
`pretrained.py` fills a model from safetensors of others.

**A piece is a box.** A rank's part of a tensor, whatever placements, stripes or uneven ends it has, is a few boxes of
the whole one; so are the pieces in files. Loading is the boxes' intersection, on any mesh, and that pieces cover each
element once is an identity of corners (`boxes.covers`), known before a byte is read.

**Blocks are hashed, not files**, so that a rank that needs a part of a piece knows that part to be whole, and reads
little else. **Nothing is overwritten**: a step is written beside the others under another name, and becomes one of them
by a rename. **What one rank fails at is told on all of them** (`meeting.together`), at every point where they wait.
"""
