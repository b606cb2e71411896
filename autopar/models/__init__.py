"""Models that autopar finds by name, and what is particular to HuggingFace's.

`catalogue` finds and builds, `plain` holds two small torch.nn models, `huggingface` is the only file that imports
transformers.
"""
