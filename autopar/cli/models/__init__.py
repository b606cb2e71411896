"""Models that autopar finds by name. `catalogue` finds and builds, `batches` makes a batch by what a forward accepts,
`plain` holds two small torch.nn models; configurations are JSON in `data/`. What is particular to HuggingFace's is
in `base/huggingface`.
"""
