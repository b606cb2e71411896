"""Recording a gradient where torch's dispatcher has left autograd behind: inside an operator's own kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AUTOGRAD = [name for name in dir(torch._C.DispatchKey) if name.startswith(("Autograd", "ADInplaceOrView"))]


@contextmanager
def recording() -> Iterator[None]:
    """What runs inside is recorded for torch.autograd.grad, in a kernel that was dispatched below autograd, too."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
