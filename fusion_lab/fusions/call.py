"""A call of an operator, with what its schema tells of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Call:
    """A call of an operator: its arguments by name, and the tensors that it reads, writes, and
    makes."""

    def __init__(
        self,
        function: Callable,
        name: str,
        args: Sequence,
        kwargs: dict,
        inputs: list[Tensor],
        result: object,
        written: Sequence[Tensor],
    ):
        self.function = function
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.result = result
        self.plain = name.removeprefix("_foreach_")
        self.outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.fresh = self.outputs  # those in memory of their own
        self.tags = getattr(function, "tags", ())
        self.is_own = getattr(function, "namespace", "") != "aten"
        self.is_pointwise = torch.Tag.pointwise in self.tags
        arguments = getattr(getattr(function, "_schema", None), "arguments", ())
        values = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(arguments)]
        pairs = [*zip(arguments, values, strict=True)]
        self.named = {argument.name: value for argument, value in pairs}
        changed = [t for a, value in pairs if a.is_write for t in tree_leaves(value)]
        self.written = [*written, *(t for t in changed if isinstance(t, Tensor))]
        self.has_mask = any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:])

    @property
    def has_dynamic_shape(self) -> bool:
        """Does the shape of the result depend on values?"""
        dynamic = torch.Tag.dynamic_output_shape in self.tags
        return dynamic and (self.name != "index" or self.has_mask)
