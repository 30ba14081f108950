"""Executes a launch of a Triton kernel, compiled for an MI300X, on tensors.

Kernels must be compilable: TRITON_INTERPRET=0 before anything imports Triton.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import triton

from fusion_lab.amd import execute
from fusion_lab.amd.assembly import Program, Unknown, parse
from fusion_lab.amd.counters import Counts
from fusion_lab.amd.memory import Fault, Memory, Part
from fusion_lab.amd.record import bytes_of
from fusion_lab.amd.waves import Waves
from fusion_lab.cli import say

if not hasattr(triton, "knobs"):
    say(f"error: executing AMD's code needs Triton 3.4 or newer, this is {triton.__version__}")
    sys.exit(4)
TARGET = "gfx942"  # the GPU whose code is executed
AT_ONCE = 256  # waves that execute together: more cost no less
PACKED = {"fp32": "<f", "fp64": "<d", "i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i",
          "i64": "<q", "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q"}  # fmt: skip


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
        if self.program.descriptor["float_denorm_mode_32"] != 3:
            raise Unknown(f"{self.program.name}: denormal numbers that become 0")


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

    def start(self, groups: np.ndarray) -> Waves:
        """Waves of these workgroups [groups, 3] at the first instruction."""
        kernel, described = self.kernel, self.kernel.program.descriptor
        waves = Waves(kernel.program, kernel.registers, len(groups), kernel.waves, kernel.lds)
        waves.memory = self.memory
        wave = np.arange(waves.count)[:, None]
        # the work-item's number; in higher bits those of other dimensions, which are 0
        waves.put(0, (wave % kernel.waves * 64 + np.arange(64)).astype(np.uint32))
        waves.put_scalar(0, np.array([[self.address]], np.uint64).view(np.uint32))
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
            content[:] = part.bytes
        return {part.name for part, _ in self.tensors if part.was_read}


def explained(fault: Fault, waves: Waves, groups: np.ndarray) -> Fault:
    """The fault with kernel, source line and the first lane that it concerns."""
    wave, lane = (int(n) for n in np.argwhere(fault.lanes)[0])
    group = tuple(int(n) for n in groups[wave // waves.waves])
    lane = f", lane {lane}" if fault.lanes.shape[1] > 1 else ""
    where = f"workgroup {group}, wave {wave % waves.waves}{lane}"
    instruction = waves.program.code[waves.pc - 1]
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
        waves.watch = counts if watch else None
        try:
            waves.run()
        except Fault as fault:
            raise explained(fault, waves, some) from None
        except Unknown as error:
            raise Unknown(f"{kernel.program.where(waves.pc - 1)}: {error}") from error
        counts.add(waves)
    counts.read = loaded.give_back()
    return counts
