"""Compiles a Triton kernel for an AMD GPU, without one, and executes what comes out on tensors.

    from fusion_lab.amd.launch import launch
    counts = launch(add_relu, (4,), X=x, Y=y, OUT=out, n=1000, BLOCK=256)

Kernels must be compilable: TRITON_INTERPRET=0 before anything imports Triton.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner

from fusion_lab.amd import compiling, execute
from fusion_lab.amd.assembly import Program, Unknown, parse
from fusion_lab.amd.counters import Counts
from fusion_lab.amd.memory import Fault, Memory, Part
from fusion_lab.amd.record import Recorded, bytes_of
from fusion_lab.amd.waves import Waves
from fusion_lab.cli import say

if not hasattr(triton, "knobs"):
    say(f"error: executing AMD's code needs Triton 3.4 or newer, this is {triton.__version__}")
    sys.exit(4)
triton.knobs.runtime.interpret = False  # also for files that ask for the interpreter
TARGETS = ("gfx942", "gfx90a", "gfx950")
AT_ONCE = 256  # waves that execute together: more cost no less
PACKED = {"fp32": "<f", "fp64": "<d", "i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i",
          "i64": "<q", "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q"}  # fmt: skip
# what a start can have in scalar registers before the address of the arguments, and how many; here
# they are not set
BEFORE = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2}


class Kernel:
    """A compiled kernel: its program, and what a launch passes to it."""

    def __init__(self, compiled, text: str | None = None):
        """`text` is in place of the assembly, for tests that change it."""
        self.program: Program = parse(text or compiled.asm["amdgcn"])
        self.registers = execute.prepare(self.program)
        self.multiplies_in_xf32 = any("_xf32" in each.mnemonic for each in self.program.code)
        self.waves = compiled.metadata.num_warps
        self.lds = compiled.metadata.shared
        names = compiled.src.fn.arg_names
        self.passed = {
            name: kind
            for name, kind in compiled.src.signature.items()
            if kind != "constexpr" and (names.index(name),) not in compiled.src.constants
        }
        start = self.program.descriptor
        if start["private_segment_fixed_size"] and start.get("user_sgpr_private_segment_buffer"):
            raise Unknown(f"{self.program.name}: gfx90a finds spilled registers by a descriptor")
        if start["float_denorm_mode_32"] != 3:
            raise Unknown(f"{self.program.name}: denormal numbers that become 0")


def compile_for(kernel: triton.JITFunction, target: str, arguments: Mapping) -> object:
    """What Triton compiles for a launch on this GPU of AMD's, such as "gfx942"."""
    return compiling.compile_for(GPUTarget("hip", target, 64), kernel, arguments)


def imported(path: Path, wanted: str) -> ModuleType:
    """The module of a file, even if it ends with an error behind what is wanted: its own checks
    fail where launches compute nothing."""
    if (folder := str(path.parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit):
        if not hasattr(module, wanted):
            del sys.modules[path.stem]
            raise
    return module


def kernel_of(launch: Recorded) -> triton.JITFunction:
    """The kernel of a recorded launch, from its file."""
    path = Path(launch.file)
    module = sys.modules.get(path.stem)
    if getattr(module, "__file__", None) != launch.file:
        # what the file itself launches has been recorded
        with contextlib.ExitStack() as stack:
            for kind in (triton.JITFunction, Autotuner):
                skipped = mock.patch.object(kind, "run", lambda *given, **named: None)
                stack.enter_context(skipped)
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            module = imported(path, launch.kernel)
    kernel = getattr(module, launch.kernel, None)
    while kernel is not None and not isinstance(kernel, triton.JITFunction):
        kernel = getattr(kernel, "fn", None)  # of an autotuner or heuristics
    if kernel is None:
        raise Unknown(f"{path.name} has no kernel of the name {launch.kernel}, made when imported")
    return kernel


def compiled_launch(launch: Recorded, target: str) -> object:
    """What Triton compiles for a recorded launch."""
    return compile_for(kernel_of(launch), target, launch.with_tensors(launch.before))


class Loaded:
    """A launch as the GPU finds it: tensors and numbers in memory."""

    def __init__(self, kernel: Kernel, grid: Sequence[int], arguments: Mapping):
        self.kernel, self.memory = kernel, Memory()
        self.tensors: list[tuple[Part, np.ndarray]] = []  # in memory, and what it is a copy of
        described, addresses = kernel.program.arguments, {}
        packed = bytearray(kernel.program.descriptor["kernarg_size"])
        for (name, kind), place in zip(kernel.passed.items(), described, strict=False):
            value = arguments[name]
            if kind.startswith("*"):
                storage = value.untyped_storage().data_ptr()
                if storage not in addresses:
                    content = bytes_of(value).numpy()
                    addresses[storage] = self.memory.add(name, content)
                    self.tensors.append((self.memory.parts[-1], content))
                value = addresses[storage] + value.storage_offset() * value.element_size()
            form = "<Q" if kind.startswith("*") else PACKED[kind]
            struct.pack_into(form, packed, int(place["offset"]), value)
        for place in described:
            if place["value_kind"].startswith("hidden_block_count"):
                size = grid["xyz".index(place["value_kind"][-1])]
                struct.pack_into("<I", packed, int(place["offset"]), size)
            elif place["value_kind"] == "hidden_group_size_x":
                struct.pack_into("<H", packed, int(place["offset"]), 64 * kernel.waves)
        self.address = self.memory.add("the arguments", np.frombuffer(bytes(packed), np.uint8))
        self.spilled = kernel.program.descriptor["private_segment_fixed_size"]  # bytes of a lane
        room = np.zeros(AT_ONCE * 64 * self.spilled, np.uint8)
        self.scratch = self.memory.add("the spilled registers", room)

    def start(self, groups: np.ndarray) -> Waves:
        """Waves of these workgroups [groups, 3] at the first instruction."""
        kernel, described = self.kernel, self.kernel.program.descriptor
        waves = Waves(kernel.program, kernel.registers, len(groups), kernel.waves, kernel.lds)
        waves.memory = self.memory
        lanes = np.arange(64 * waves.count, dtype=np.uint64).reshape(-1, 64)
        waves.scratch = self.scratch + self.spilled * lanes
        wave = np.arange(waves.count)[:, None]
        # the work-item's number; in higher bits those of other dimensions, which are 0
        waves.put(0, (wave % kernel.waves * 64 + np.arange(64)).astype(np.uint32))
        place = sum(n * described.get(f"user_sgpr_{name}", 0) for name, n in BEFORE.items())
        waves.put_scalar(place, np.array([[self.address]], np.uint64).view(np.uint32))
        place = described["user_sgpr_count"]
        for axis in range(3):
            if described[f"system_sgpr_workgroup_id_{'xyz'[axis]}"]:
                number = np.repeat(groups[:, axis : axis + 1], kernel.waves, axis=0)
                waves.put_scalar(place, number.astype(np.uint32))
                place += 1
        return waves

    def give_back(self) -> set[str]:
        """Write what the kernel has done to its tensors into them; returns which it has read."""
        for part, content in self.tensors:
            content[:] = part.content()
        return {part.name for part, _ in self.tensors if part.was_read}


def explained(fault: Fault, waves: Waves, groups: np.ndarray) -> Fault:
    """The fault with kernel, source line and the first lane that it concerns."""
    instruction = waves.program.code[waves.pc - 1]
    wave, lane = (int(n) for n in np.argwhere(np.atleast_2d(fault.lanes))[0])
    group = tuple(int(n) for n in groups[wave // waves.waves])
    lane = f", lane {lane}" if fault.lanes.shape[1] > 1 else ""
    where = f"workgroup {group}, wave {wave % waves.waves}{lane}"
    text = f"{waves.program.name}, {instruction.line}: {fault} ({where}; {instruction.text})"
    return Fault(text, fault.lanes)


def run_grid(
    kernel: Kernel, grid: Sequence[int], arguments: Mapping, watch: bool = False
) -> Counts:
    """Execute all workgroups; tensors among the arguments are changed as on a GPU. A Fault says
    where something is wrong."""
    grid = (*grid, 1, 1)[:3]
    loaded, counts = Loaded(kernel, grid, arguments), Counts(kernel.program)
    groups = np.stack(np.unravel_index(np.arange(np.prod(grid)), grid, order="F"), axis=1)
    step = AT_ONCE // kernel.waves
    for first in range(0, len(groups), step):
        some = groups[first : first + step]
        waves = loaded.start(some)
        waves.watch = counts.watching(waves) if watch else None
        try:
            waves.run()
        except Fault as fault:
            raise explained(fault, waves, some) from None
        counts.add(waves)
    counts.read = loaded.give_back()
    return counts


def launch(
    kernel: triton.JITFunction, grid: Sequence[int], *, target: str = "gfx942", **arguments
) -> Counts:
    """Compile a kernel for a GPU and execute a launch; returns what was counted."""
    compiled = Kernel(compile_for(kernel, target, arguments))
    return run_grid(compiled, grid, arguments, watch=True)
