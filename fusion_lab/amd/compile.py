"""Compile what a program launches for a GPU that is not there, and show what each kernel takes.

Of a version script it is one training step, on tensors without contents: with the arguments, block
sizes and warps that the script chooses for this GPU. Other programs run in Triton's interpreter
first. The exit status is 1 if a kernel spills registers, needs more LDS than a workgroup can have,
or does not compile.

LDS is in bytes per workgroup. A spilled VGPR goes to memory, a spilled SGPR to a lane of a VGPR.
Waves per SIMD is what registers and LDS leave room for: the compiler's own figure knows the
registers only, because Triton asks for LDS at launch, so it is lowered here to what fits into the
LDS of a compute unit. Of an H100 (sm_90) shared memory stands under LDS.

Examples:
  amd-run compile my_kernels.py
  amd-run compile tiny_llama_v3.py --use-amp --target gfx942 gfx90a
  amd-run compile tiny_llama_v3.py --use-amp --blocks attention_forward:BLOCK_M=128
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import triton
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner

from fusion_lab.amd.record import (
    Recorded,
    View,
    is_version,
    launches_of,
    step_arguments,
    take_step,
)
from fusion_lab.cli import Parser, ToolError, documented_parser, program, say, sign_of_life
from fusion_lab.profile.traffic import Launching
from fusion_lab.script import load_script
from fusion_lab.show import Column, render

if hasattr(triton, "knobs"):
    triton.knobs.runtime.interpret = False  # also for files that ask for the interpreter
# for Triton, and the KiB of LDS (NVIDIA: shared memory) of a compute unit, which a workgroup can
# have
TARGETS = {
    "gfx908": (GPUTarget("hip", "gfx908", 64), 64),  # MI100
    "gfx90a": (GPUTarget("hip", "gfx90a", 64), 64),  # MI200
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),  # MI300
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160),  # MI350
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), 64),  # Radeon RX 7000
    "sm_90": (GPUTarget("cuda", 90, 32), 227),  # H100
}


def compile_for(gpu: GPUTarget, kernel: triton.JITFunction, arguments: Mapping) -> object:
    """What Triton compiles for a launch with these arguments; kernel options are among them."""
    driver = SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: str(gpu.arch),
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    return kernel.run(grid=(1,), warmup=True, **arguments)


def kernel_of(launch: Recorded) -> triton.JITFunction:
    """The kernel of a recorded launch, from its file, which is imported once.

    The file may end with an error behind the kernel: its own launches compute nothing here, as they
    have been recorded, so its own checks can fail.
    """
    path, error = Path(launch.file), None
    module = sys.modules.get(path.stem)
    if getattr(module, "__file__", None) != launch.file:
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        nothing = {"attribute": "run", "new": lambda *given, **named: None}
        with (
            mock.patch.object(triton.JITFunction, **nothing),
            mock.patch.object(Autotuner, **nothing),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                spec.loader.exec_module(module)
            except (Exception, SystemExit) as ended:
                error = ended
    kernel = getattr(module, launch.kernel, None)
    while kernel is not None and not isinstance(kernel, triton.JITFunction):
        kernel = getattr(kernel, "fn", None)  # of an autotuner or heuristics
    if kernel is None:
        reason = f": {error!r}" if error else ""
        raise ToolError(f"{path.name}: importing it makes no kernel {launch.kernel}{reason}")
    return kernel


def compiled_launch(launch: Recorded, target: str) -> object:
    """What Triton compiles for a recorded launch."""
    return compile_for(TARGETS[target][0], kernel_of(launch), launch.arguments)


# --- what is launched


class Launch:
    """A kernel and the arguments of a launch, tensors as View."""

    def __init__(self, kernel: triton.JITFunction, arguments: Mapping):
        self.kernel, self.arguments = kernel, arguments
        self.name = kernel.__name__.removesuffix("_kernel")
        variable = set(kernel.arg_names) - {kernel.arg_names[i] for i in kernel.constexprs}
        self.constants = {n: v for n, v in arguments.items() if n not in variable or v is None}

    def key(self) -> tuple:
        """Equal for launches that the same compiled kernel serves."""
        seen = (
            (value.dtype, value.data_ptr() % 16 == 0, value.behind < 2**31)
            if isinstance(value, View)
            else (type(value), value == 1, value % 16 == 0, value < 2**31)
            for name, value in self.arguments.items()
            if name not in self.constants
        )
        return self.name, *self.constants.items(), *seen

    def __str__(self) -> str:
        # a float, such as eps, tells no kernels apart
        named = {name: value for name, value in self.constants.items() if type(value) is not float}
        return " ".join(f"{name}={value}" for name, value in named.items())


def launches_of_step(module: ModuleType, argv: Sequence[str], backend: str) -> list[Launch]:
    """What a training step of a version script would launch on this backend, each once."""
    launches: dict[tuple, Launch] = {}

    def seen(kernel: triton.JITFunction, grid: tuple, arguments: dict) -> None:
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                arguments[name] = View.on(0, value)
        launch = Launch(kernel, arguments)
        launches.setdefault(launch.key(), launch)

    def address(tensor: torch.Tensor) -> int:
        return tensor.storage_offset() * tensor.element_size()  # of one without contents

    module.wrap_triton = lambda kernel: Launching(kernel, seen)
    # a storage without contents has no address, and PyTorch warns of one
    storage = mock.patch("torch.UntypedStorage.data_ptr", lambda storage: 0)
    with storage, mock.patch("torch.Tensor.data_ptr", address):
        take_step(module, step_arguments(module, argv, backend), FakeTensorMode())
    return list(launches.values())


def launches_of_program(file: Path, argv: Sequence[str]) -> list[Launch]:
    """What any program launches, each once."""
    found = (Launch(kernel_of(x), x.arguments) for x in launches_of(file, argv))
    return list({launch.key(): launch for launch in found}.values())


# --- what it needs


@dataclass(frozen=True)
class Needs:
    """What a compiled kernel takes, per thread, wave and workgroup in this order."""

    vgprs: int
    agprs: int
    sgprs: int
    lds: int  # bytes
    spills: int  # vector registers, to memory; on NVIDIA bytes
    sgpr_spills: int  # scalar registers, to lanes of vector registers
    waves: float  # per SIMD


TITLES = ("VGPRs", "AGPRs", "SGPRs", "LDS", "spills", "SGPR spills", "waves per SIMD")


def needs(compiled, kib: int) -> Needs:
    """Read from the assembly, or from NVIDIA's binary."""
    warps, lds = compiled.metadata.num_warps, compiled.metadata.shared
    if "amdgcn" in compiled.asm:

        def number(name: str) -> int:
            return int(re.search(rf"{name}:\s*(\d+)", compiled.asm["amdgcn"])[1])

        registers = [number(name) for name in ("NumVgprs", "NumAgprs", "TotalNumSgprs")]
        spills = number("vgpr_spill_count") or number("ScratchSize"), number("sgpr_spill_count")
        waves = number("Occupancy")
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used, stack = (int(re.search(rf"{name}:(\d+)", printed)[1]) for name in ("REG", "STACK"))
        registers, spills = (used, 0, 0), (stack, 0)
        waves = min(16, 65536 // 32 // 4 // (-(-used // 8) * 8))
    # that share the four SIMDs of a compute unit
    groups = min(4 * waves // warps, kib * 1024 // max(lds, 1))
    return Needs(*registers, lds, *spills, groups * warps / 4)


LAUNCHES: list[Launch] = []  # the workers are forked, so they find what is to be compiled here


def compile_launch(index: int, target: str) -> Needs | str:
    """What a launch needs, or why it does not compile. Runs in a worker."""
    launch, (gpu, kib) = LAUNCHES[index], TARGETS[target]
    try:
        return needs(compile_for(gpu, launch.kernel, launch.arguments), kib)
    except Exception as error:  # of many kinds, down to a failed pass of the compiler
        return (str(error).strip() or type(error).__name__).splitlines()[-1]


def compile_all(launches: list[Launch], target: str) -> list[Needs | str]:
    """For each launch what it needs."""
    LAUNCHES[:] = launches
    context, cores = multiprocessing.get_context("fork"), len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, context) as pool:
        try:
            return list(pool.map(compile_launch, range(len(launches)), itertools.repeat(target)))
        except BrokenProcessPool as error:
            raise ToolError("the compiler crashed", status=1) from error


def problem(target: str, needs: Needs | str) -> str:
    """What keeps a kernel from running well on a target, or at all."""
    if isinstance(needs, str):
        return f"does not compile: {needs}"
    if needs.lds > TARGETS[target][1] * 1024:
        return f"needs {needs.lds} bytes of LDS"
    if needs.spills:
        return f"spills {needs.spills} {'VGPRs' if target.startswith('gfx') else 'bytes'}"
    return f"spills {needs.sgpr_spills} SGPRs" if needs.sgpr_spills else ""


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Print a table for each target; what is wrong is a line each on stderr, and the status 1."""
    status = 0
    for target in args.target:
        with sign_of_life(f"compiling for {target}"):
            if is_version(args.file):
                backend = TARGETS[target][0].backend
                launches = launches_of_step(load_script(str(args.file)), argv, backend)
            else:
                launches = launches_of_program(args.file, argv)
            if not launches:
                raise ToolError(f"{args.file} launches no kernel")
            launches.sort(key=lambda launch: launch.name)
            rows = list(zip(launches, compile_all(launches, target), strict=True))
        for launch, needed in rows:
            if wrong := problem(target, needed):
                say(f"{args.file.stem}: {launch.name} ({launch}): {target} {wrong}")
                status = 1
        columns = [
            Column("kernel", lambda row: row[0].name),
            Column("constants", lambda row: str(row[0]), text=True),
            *(
                Column(title, lambda row, field=field: getattr(row[1], field, None), "g")
                for title, field in zip(TITLES, Needs.__dataclass_fields__, strict=True)
            ),
        ]
        print(f"{args.file.stem}, on {target}:\n\n{render(columns, rows)}\n")
    return status


def build_parser() -> Parser:
    parser = documented_parser("amd-run compile", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE.py")
    text = f"of {', '.join(TARGETS)} (default: gfx942)"
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=["gfx942"], metavar="NAME",
                        help=text)  # fmt: skip
    return parser


main = program(build_parser, run, of_scripts=True)
