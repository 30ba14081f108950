"""Triton's interpreter in half of its time, for tests, which launch thousands of kernels in it.

It replaces the functions of triton.language by its own when a kernel starts, and again for each
function that a kernel calls: here only where that module's are not replaced yet. And it computes
sums and products of integers twice, to find overflow, which small tensors do not have: here once.
"""

from __future__ import annotations

from dataclasses import replace


def make_quicker() -> None:
    """Change the interpreter of this process; results stay the same to the bit."""
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
