"""Products with sparse matrices that a model holds (the adjacency of a graph): rows of the other factor, added up.

    torch.sparse.mm(self.graph, x)  →  zeros.index_add(0, rows, values * x[columns])

Which elements there are is the model's, as any tensor is that forward finds on its modules: they are constants of the
program. Of a sparse tensor in a batch nothing is known while a model is traced (`planner/inputs.py` refuses it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import lifted

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def _product(function: Callable[..., Any], first: Any, second: Any, *rest: Any, **options: Any) -> Any:
    """As torch's, of a matrix [n, m] and a matrix [m, k] or a vector [m]."""
    is_sparse = isinstance(first, Tensor) and first.layout in _SPARSE
    if not is_sparse or rest or options or second.layout in _SPARSE or first.requires_grad or first.is_meta:
        return function(first, second, *rest, **options)
    with compat.outside_of_tracing():
        held = first.detach().to_sparse_coo().coalesce()
        indices, values = held.indices().clone(), held.values().clone()
    (rows, columns), values = lifted(indices).unbind(), lifted(values)
    terms = second[columns] * (values if second.dim() == 1 else values[:, None])
    return terms.new_zeros(first.shape[0], *second.shape[1:]).index_add(0, rows, terms)


FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    function: partial(_product, function)
    for function in (
        torch.sparse.mm, torch.spmm, torch.mm, torch.mv, torch.matmul, Tensor.mm, Tensor.mv, Tensor.matmul,
        Tensor.__matmul__,
    )
}  # fmt: skip
