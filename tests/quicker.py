"""What tests of this repository run a thousand times, in less time: Triton's interpreter, and
PyTorch's profiler. Results stay the same to the bit. Without it tests of kernels take 2.5 times as
long: test_triton_steps.py, _llama.py and _openfold_v4.py 86 s of a processor's time in place of 34.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch


def make_quicker() -> None:
    """Change the profiler and Triton's interpreter in this process."""
    from triton.language import semantic

    # Of a profile that is only written as a trace nobody reads the events. They are made when asked
    # for, also where several cycles could be added up, which nothing here does.
    torch.autograd.profiler.profile.acc_events = property(lambda self: False, lambda self, on: None)
    if hasattr(semantic.TritonSemantic, "_cast_to_computation_type"):
        replace_the_language_once()
        remember_types()  # else it is an earlier interpreter, which does without


def replace_the_language_once() -> None:
    """The interpreter replaces the functions of triton.language by its own when a kernel starts,
    and again for each function that a kernel calls: here only where that module's are not replaced
    yet. It computes sums and products of integers twice, to find overflow, which small tensors do
    not have: here once.
    """
    from triton.runtime import interpreter

    replaced = set()

    def call(function: interpreter.InterpretedFunction, *args, **kwargs):
        if function.fn.__module__ not in replaced:
            interpreter._patch_lang(function.fn)
            replaced.add(function.fn.__module__)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """The interpreter makes the type and shape of each value anew, and casts and broadcasts values
    that have the right type and shape: here one object stands for all types that are alike.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    make_block_type, compare = core.block_type.__init__, core.dtype.__eq__
    cast = semantic.TritonSemantic._cast_to_computation_type
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    numpy_type = functools.cache(interpreter._get_np_dtype)
    known = {}

    def block_type(self: core.block_type, element_ty: core.dtype, shape: Sequence) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            make_block_type(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    @functools.cache
    def shape_of(*sizes: int) -> tuple[core.constexpr, core.tuple]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(n) for n in sizes])

    def tensor(self: core.tensor, handle: interpreter.TensorHandle, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(*(type.shape.values if type.is_block() else ()))

    def cast_others(self, value: core.tensor | float, dtype: core.dtype) -> core.tensor:
        return value if getattr(value, "dtype", None) is dtype else cast(self, value, dtype)

    def broadcast_others(self, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, ...]:
        blocks = [value.type.shape.values for value in (lhs, rhs) if value.type.is_block()]
        alike = not blocks or (len(blocks) == 2 and blocks[0] == blocks[1])
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.dtype.__eq__ = lambda self, other: self is other or compare(self, other)
    semantic.TritonSemantic._cast_to_computation_type = cast_others
    semantic.TritonSemantic.broadcast_impl_value = broadcast_others
    interpreter._get_np_dtype = lambda type: numpy_type(
        core.uint64 if type.scalar.is_ptr() else type.scalar
    )
