"""Operators as who writes a model calls them, for what is said of a model.

aten.nonzero.default → nonzero      aten.index.Tensor → x[index]      aten.convolution_backward.default → the
gradient of a convolution
"""

from __future__ import annotations

import re

_OPERATOR = re.compile(r"\baten\.(\w+)(?:\.\w+)?")
_BACKWARDS = ("_backward", "_backward_data")
_WRITTEN = {
    "_softmax": "softmax", "_log_softmax": "log_softmax", "_to_copy": ".to(…)", "_unsafe_view": "view",
    "_unique2": "unique", "_fused_rms_norm": "rms_norm", "addmm": "linear", "bmm": "matmul", "mm": "matmul",
    "convolution": "a convolution", "index": "x[index]", "index_put": "x[index] = …", "_index_put_impl": "x[index] = …",
    "_unsafe_index": "x[index]", "select": "x[i]", "slice": "x[a:b]", "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm", "_native_batch_norm_legit_functional": "batch_norm",
    "cudnn_batch_norm": "batch_norm", "native_layer_norm": "layer_norm", "native_group_norm": "group_norm",
    "native_dropout": "dropout", "linalg_vector_norm": "linalg.vector_norm", "embedding_dense": "embedding",
    "_local_scalar_dense": ".item()", "max_pool2d_with_indices": "max_pool2d", "_embedding_bag": "embedding_bag",
}  # fmt: skip
"""By what torch's graphs call them: names that nobody writes."""


def operator_word(name: str) -> str:
    """An operator's name without its library and overload (`convolution_backward`) in the words of a model's code."""
    for ending in _BACKWARDS:
        if name.endswith(ending):
            return f"the gradient of {operator_word(name.removesuffix(ending))}"
    return _WRITTEN.get(name) or name.removeprefix("_")


def spoken(text: str) -> str:
    """The text with every `aten.name.overload` in the words of a model's code."""
    return _OPERATOR.sub(lambda found: operator_word(found[1]), text)
