"""What runtime/regions.py and autopar/api/backend.py need of torch.compile that has no public name."""

from __future__ import annotations

from typing import Any


def lookup_backend(name: str) -> Any:
    """The compiler behind a backend's name: (graph module, example inputs) -> callable. Imports torch._dynamo.

    Raises:
        Exception: there is none of that name.
    """
    from torch._dynamo.backends.registry import lookup_backend as lookup

    return lookup(name)


def within(run: Any) -> Any:
    """A function that a backend made, without what switches Dynamo off around each of its calls: for whoever calls it
    where Dynamo does not look. Torch 2.11 to 2.13.
    """
    return getattr(run, "_torchdynamo_orig_callable", run)


def leave_to_eager(*kinds: type[Any], backward_of: type[Any]) -> None:
    """Have torch.compile run what meets a tensor of these classes as it is (runtime/module.py): their functions gather,
    which its fake tensors cannot. So too the backward of an `autograd.Function`: around `loss.backward()` torch breaks
    its graph, and looks into what that calls. Torch 2.11 to 2.13; idempotent.
    """
    import torch
    from torch._dynamo import config

    known: set[type[Any]] = getattr(config, "nontraceable_tensor_subclasses", set())
    known.update(kinds)
    if not hasattr(backward_of.backward, "_torchdynamo_disable"):
        backward_of.backward = staticmethod(torch.compiler.disable(backward_of.backward))


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises when it, and not the function, fails."""
    from torch._dynamo.exc import InternalTorchDynamoError, TorchDynamoException

    return (TorchDynamoException, InternalTorchDynamoError)


def is_layout_assertion(error: Exception) -> bool:
    """Whether compiled code found a tensor laid out otherwise than it was told (`assert_size_stride`): an operator's
    fake is wrong, or compiled code met other strides than when it was compiled.
    """
    text = str(error)
    return isinstance(error, AssertionError) and text.startswith(("expected size", "wrong number of dimensions"))


def where_from(placeholder: Any) -> tuple[str, bool]:
    """What Dynamo lifted into an input of its graph, as the Python expression that finds it, such as
    `L['self']._modules['head']._parameters['weight']`, and whether it hangs on an nn.Module.

    Known until the backend has returned; the placeholder's own name where Dynamo made it up (a symbolic size).
    """
    source: Any = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        return str(placeholder.target), False
    name, kind = source.name, source.guard_source
    name, kind = (each() if callable(each) else each for each in (name, kind))  # methods in earlier versions of torch
    return str(name), "NN_MODULE" in kind.name
