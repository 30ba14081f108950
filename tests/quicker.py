"""What tests of this repository run a thousand times, in less time: Triton's interpreter, and
PyTorch's profiler. Results stay the same to the bit. Without it test_triton_steps.py, _llama.py and
_openfold_v4.py take 81 s of a processor's time in place of 49.
"""

from __future__ import annotations

from dataclasses import replace

import torch


def make_quicker() -> None:
    """Change the profiler and Triton's interpreter in this process."""
    from triton.language import semantic

    # Of a profile that is only written as a trace nobody reads the events. They are made when asked
    # for, also where several cycles could be added up, which nothing here does.
    torch.autograd.profiler.profile.acc_events = property(lambda self: False, lambda self, on: None)
    if hasattr(getattr(semantic, "TritonSemantic", None), "_cast_to_computation_type"):
        replace_the_language_once()  # else it is an earlier interpreter, which does without


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
