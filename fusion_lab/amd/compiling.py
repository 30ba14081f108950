"""Compiling a kernel for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget


def compile_for(gpu: GPUTarget, kernel: triton.JITFunction, arguments: Mapping) -> object:
    """What Triton compiles for a launch with these arguments; kernel options are among them."""
    driver = SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: str(gpu.arch),
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    return kernel.run(grid=(1,), warmup=True, **arguments)
