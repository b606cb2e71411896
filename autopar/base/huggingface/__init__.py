"""All that is particular to HuggingFace: the cache switch, configurations, tiny models. The only place that imports
transformers, and late: it is an extra.

`huggingface.py` knows configurations and outputs, `stages.py` those of convolutional models, `tiny.py` makes a small
configuration that keeps what is awkward about the large one. It does not know the catalogue (`cli/models`), and nothing
here says how a model is split: no pass or rule knows a model's name.
"""
