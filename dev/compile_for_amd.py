#!/usr/bin/env python3
"""Compile every Triton kernel as AMD's GPUs would get it, without a GPU, and check what it needs
there.

A training step of each script runs on tensors without contents, in every precision and at several
sizes, and what it would launch is compiled instead: with the arguments, block sizes and warps that
the script chooses for AMD; of TinyLlama V4 also what inference launches. Prints a table per
script. The exit status is 1 if a kernel spills registers, needs more LDS than a workgroup can have,
does not compile, or is never launched.

LDS is in bytes per workgroup. A spilled VGPR goes to memory, a spilled SGPR to a lane of a
VGPR. Waves per SIMD is what registers and LDS leave room for: the compiler's own figure knows the
registers only, because Triton asks for LDS at launch, so it is lowered here to what fits into the
LDS of a compute unit.

Examples:
  python dev/compile_for_amd.py                  all scripts, targets, precisions, sizes: minutes
  python dev/compile_for_amd.py tiny_llama_v3.py --target gfx942 --dtype bfloat16 --size default
  python dev/compile_for_amd.py tiny_llama_v3.py --blocks attention_forward:BLOCK_M=128
  python dev/compile_for_amd.py --target sm_90   for NVIDIA's H100, shared memory under LDS
  python dev/compile_for_amd.py --write          results/amd/registers.csv
  python dev/compile_for_amd.py --summary        what this file says of each script and target

The file has two checksums of each row: of the kernel's source, and of its machine code. By the
first --summary finds rows of kernels that have changed since, by the second those whose machine
code dev/run_on_amd.py has executed.
"""

import argparse
import csv
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton: kernels are to be compiled
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # without it Triton 3.9 prints a warning

import torch
import triton
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget

from fusion_lab.amd import checksums
from fusion_lab.amd.compiling import compile_for
from fusion_lab.cli import Parser, ToolError, documented_parser, note, program, say
from fusion_lab.files import ROOT, read_json
from fusion_lab.profile.traffic import Launching
from fusion_lab.script import load_script
from fusion_lab.show import Column, render, write_csv

REGISTERS, EXECUTED = ROOT / "results/amd/registers.csv", ROOT / "results/amd/executed.json"
SCRIPTS = sorted(path.name for path in ROOT.glob("tiny_*_v[34].py"))
# for Triton, and the KiB of LDS (NVIDIA: shared memory) of a compute unit, which a workgroup can
# have
TARGETS = {
    "gfx908": (GPUTarget("hip", "gfx908", 64), 64),  # MI100
    "gfx90a": (GPUTarget("hip", "gfx90a", 64), 64),  # MI200
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),  # MI300
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160),  # MI350
    "gfx1030": (GPUTarget("hip", "gfx1030", 32), 64),  # Radeon RX 6000
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), 64),  # Radeon RX 7000
    "sm_90": (GPUTarget("cuda", 90, 32), 227),  # H100
}
INFERENCE = "tiny_llama_v4"  # whose inference is a program of its own
ONE_LAUNCH = ROOT / "exercises/tiny_llama_v4/one_launch.py"
AMD = [name for name in TARGETS if name.startswith("gfx")]
USUAL = ["gfx90a", "gfx942", "gfx950"]  # whose kernels the files under results/ have
PRECISIONS = {
    "float32": "",
    "TF32": "--matmul-precision high",
    "bfloat16": "--use-amp",
    "float16": "--use-amp --amp-dtype float16",
}
# One layer or block launches all that several do. "short" is for a kernel that serves short
# sequences only; in "odd" little is a power of two or divisible by 16; "huge" has tensors beyond 2
# GiB, which AMD's GPUs address in another way.
SIZES = {
    "tiny_llama": {
        "default": "--num-layers 1",
        "odd": "--num-layers 1 --hidden-dim 480 --num-heads 5 --num-kv-heads 1"
        " --intermediate-dim 1001"
        " --vocab-size 1003 --seq-len 99 --batch-size 3",
        "wide": "--num-layers 1 --hidden-dim 2048 --num-heads 16 --vocab-size 32000 --seq-len 512",
        "huge": "--num-layers 1 --hidden-dim 1024 --num-heads 16 --vocab-size 50000"
        " --seq-len 4095 --batch-size 128",
    },
    "tiny_openfold": {
        "default": "--num-blocks 1",
        "short": "--num-blocks 1 --seq-len 32 --batch-size 8",
        "odd": "--num-blocks 1 --msa-dim 96 --pair-dim 32 --num-seqs 7 --seq-len 27 --batch-size 1",
        "wide": "--num-blocks 1 --msa-dim 256 --num-heads-msa 8 --num-seqs 128"
        " --seq-len 256 --batch-size 1",
        "huge": "--num-blocks 1 --num-seqs 512 --seq-len 999 --batch-size 8",
    },
}
# flags: each fusion off in turn
SIZE_NAMES = list(dict.fromkeys(itertools.chain(*SIZES.values(), ["flags"])))


class Pointer:
    """What compilation sees of a tensor: type, alignment, and whether 31 bits count its bytes."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset() * tensor.element_size()
        self.size = tensor.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        return self.offset  # as if the allocation began at 0

    def ptr_range(self) -> int:
        return self.size


class Launch:
    def __init__(self, kernel: triton.JITFunction, arguments: dict):
        self.kernel, self.arguments = kernel, arguments
        self.name = kernel.__name__.removesuffix("_kernel")
        self.precisions: dict[str, None] = {}  # in which one like it was seen, in their order
        variable = set(kernel.arg_names) - {kernel.arg_names[i] for i in kernel.constexprs}
        self.constants, self.variables = {}, {}
        for name, value in arguments.items():
            constant = name not in variable or value is None
            (self.constants if constant else self.variables)[name] = value

    def key(self) -> tuple:
        """Equal for launches that the same compiled kernel serves."""
        seen = (
            (value.dtype, value.offset % 16 == 0, value.size < 2**31)
            if isinstance(value, Pointer)
            else (type(value), value == 1, value % 16 == 0, value < 2**31)
            for value in self.variables.values()
        )
        return self.name, *self.constants.items(), *seen

    def __str__(self) -> str:
        # a float, such as eps, tells no kernels apart
        named = {name: value for name, value in self.constants.items() if type(value) is not float}
        return " ".join(f"{name}={value}" for name, value in named.items())


def sources_of(script: str) -> dict[str, str]:
    """The checksum of the source of each of a script's kernels."""
    files = [ROOT / f"{script}.py"] + ([ONE_LAUNCH] if script == INFERENCE else [])
    found = {name: sum_ for file in files for name, sum_ in checksums.of_kernels(file).items()}
    return {name.removesuffix("_kernel"): sum_ for name, sum_ in found.items()}


def kernels_of(module: ModuleType) -> set[str]:
    """The names of a script's kernels; other functions under @triton.jit are parts of kernels."""
    inference = vars(one_launch_of(module)) if module.__name__ == INFERENCE else {}
    functions = (vars(module) | inference).values()
    names = {f.__name__ for f in functions if isinstance(f, triton.JITFunction)}
    return {name.removesuffix("_kernel") for name in names if name.endswith("_kernel")}


def one_launch_of(module: ModuleType) -> ModuleType:
    """The program that TinyLlama V4 runs for inference, at work on this module."""
    from exercises.tiny_llama_v4 import one_launch

    one_launch.v4, one_launch.BACKEND = module, module.BACKEND
    one_launch.wrap_triton = module.wrap_triton
    return one_launch


def take_step(module: ModuleType, args: argparse.Namespace) -> None:
    """A training step on tensors without contents; TinyLlama V4's inference, too."""
    cpu = torch.device("cpu")
    batch = module.make_batches(args, cpu, args.seed).next_batch()
    address = mock.patch(
        "torch.Tensor.data_ptr", lambda tensor: tensor.storage_offset() * tensor.element_size()
    )
    with FakeTensorMode() as fake, address:
        batch = {name: fake.from_tensor(value) for name, value in batch.items()}
        model = module.build_model(args, cpu)
        optimizer = module.build_optimizer(args, model)
        with torch.autocast("cpu", getattr(torch, args.amp_dtype), enabled=args.use_amp):
            loss = model(**batch)
        loss.backward()
        if args.use_amp and args.amp_dtype == "float16":  # as a gradient scaler does
            optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
        optimizer.step()
        if module.__name__ == INFERENCE and args.triton_attention and args.triton_swiglu:
            one_launch, dtype = one_launch_of(module), torch.float32
            if args.use_amp:
                dtype = getattr(torch, args.amp_dtype)
            args.device = "cpu"
            layer = one_launch.first_layer(module, args, dtype)
            x = torch.empty(args.batch_size, args.seq_len, args.hidden_dim)
            for launches in (1, 5):
                one_launch.in_launches(launches, layer, x)


def record(
    module: ModuleType,
    backend: str,
    precisions: Iterable[str],
    sizes: Iterable[str],
    options: Sequence[str] = (),
) -> list[Launch]:
    """What steps of the script with these options would launch on this backend, each once."""
    launches: dict[tuple, Launch] = {}

    def seen(kernel: triton.JITFunction, grid: tuple, arguments: dict) -> None:
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                arguments[name] = Pointer(value)
        launch = Launch(kernel, arguments)
        launches.setdefault(launch.key(), launch).precisions[precision] = None

    module.BACKEND, module.wrap_triton = backend, lambda kernel: Launching(kernel, seen)
    module.shared_memory = lambda: 2**31  # nothing is left to PyTorch
    sizes_of_model = SIZES.get(module.__name__.rpartition("_v")[0])
    if not sizes_of_model or not kernels_of(module):
        which = f"a version of {' or '.join(SIZES)} that has Triton kernels"
        raise ToolError(f"{module.SCRIPT}: give {which}")
    commands = [sizes_of_model[size] for size in sizes if size in sizes_of_model]
    if "flags" in sizes:
        commands += [f"{sizes_of_model['default']} --disable-{flag}" for flag, *_ in module.FUSIONS]
    for command, precision in itertools.product(commands, precisions):
        # without a GPU a script asks for the interpreter
        with mock.patch("torch.cuda.is_available", lambda: True):
            asked = f"{command} {PRECISIONS[precision]}".split()
            args = module.parse_args([*asked, *options])
        torch.set_float32_matmul_precision(args.matmul_precision)
        module.use_settings(args)
        take_step(module, args)
    return list(launches.values())


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
    code: str = ""  # checksum of the machine code for AMD


FIELDS = [*Needs.__dataclass_fields__][:-1]  # those that are numbers
COLUMNS = ("VGPRs", "AGPRs", "SGPRs", "LDS", "spills", "SGPR spills", "waves per SIMD")


def needs(compiled, kib: int) -> Needs:
    """Read from the assembly, or from NVIDIA's binary."""
    warps, lds, code = compiled.metadata.num_warps, compiled.metadata.shared, ""
    if "amdgcn" in compiled.asm:
        code = checksums.of_code(compiled.asm["amdgcn"])

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
    return Needs(*registers, lds, *spills, groups * warps / 4, code)


LAUNCHES: list[Launch] = []  # the workers are forked, so they find what is recorded here


def compile_launch(index: int, target: str) -> Needs | str:
    """What a recorded launch needs, or why it does not compile. Runs in a worker."""
    launch, (gpu, kib) = LAUNCHES[index], TARGETS[target]
    try:
        return needs(compile_for(gpu, launch.kernel, launch.arguments), kib)
    except Exception as error:  # of many kinds, down to a failed pass of the compiler
        return (str(error).strip() or type(error).__name__).splitlines()[-1]


def compile_all(launches: list[Launch], targets: list[str]) -> list[list[Needs | str]]:
    """For each launch what it needs on each target."""
    LAUNCHES[:] = launches
    context, cores = multiprocessing.get_context("fork"), len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, context) as pool:
        numbers = range(len(launches))
        jobs = [[pool.submit(compile_launch, i, target) for target in targets] for i in numbers]
        try:
            return [[job.result() for job in row] for row in jobs]
        except BrokenProcessPool as error:
            way_out = "fewer scripts, dtypes and sizes show where"
            raise ToolError(f"the compiler crashed: {way_out}", status=1) from error


def problem(target: str, needs: Needs | str) -> str:
    """What keeps a kernel from running well on a target, or at all."""
    if isinstance(needs, str):
        return f"does not compile: {needs}"
    if needs.lds > TARGETS[target][1] * 1024:
        return f"needs {needs.lds} bytes of LDS"
    if needs.spills:
        return f"spills {needs.spills} {'VGPRs' if target in AMD else 'bytes'}"
    return f"spills {needs.sgpr_spills} SGPRs" if needs.sgpr_spills else ""


def rows_of(
    module: ModuleType, backend: str, targets: list[str], args: argparse.Namespace
) -> list[dict]:
    """A row for each kernel, configuration and target of a backend; what it needs is None where it
    does not compile, and `error` says what is wrong with it."""
    options = [part for blocks in args.blocks or () for part in ("--blocks", blocks)]
    kernels = {blocks.partition(":")[0] for blocks in args.blocks or ()} or kernels_of(module)
    launches = record(module, backend, args.dtype, args.size, options)
    launches = sorted((each for each in launches if each.name in kernels), key=lambda e: e.name)
    note(f"{module.SCRIPT}: {len(launches)} configurations for {', '.join(targets)}")
    rows = []
    for launch, found in zip(launches, compile_all(launches, targets), strict=True):
        for target, needs in zip(targets, found, strict=True):
            row = {"script": module.SCRIPT, "target": target, "kernel": launch.name}
            row |= {"precisions": ", ".join(launch.precisions), "constants": str(launch)}
            row["source"] = sources_of(module.SCRIPT)[launch.name]
            row |= dict.fromkeys(FIELDS) if isinstance(needs, str) else asdict(needs)
            what = f"{launch.name}_kernel in {row['precisions']} ({launch}): {target}"
            said = problem(target, needs)
            rows.append(row | {"error": f"{what} {said}" if said else ""})
    for kernel in sorted(kernels - {launch.name for launch in launches}):
        rows.append({"script": module.SCRIPT, "error": f"{kernel}_kernel is never launched"})
    return rows


def save(rows: list[dict]) -> None:
    """Put rows into the result file, in place of those of the same scripts and targets."""
    done, kept = {(row["script"], row["target"]) for row in rows}, []
    if REGISTERS.exists():
        with REGISTERS.open(newline="", encoding="utf-8") as file:
            others = csv.DictReader(file)
            kept = [row for row in others if (row["script"], row["target"]) not in done]
    rows = [{name: row[name] for name in row if name != "error"} for row in rows]
    REGISTERS.parent.mkdir(parents=True, exist_ok=True)
    write_csv(REGISTERS, sorted([*kept, *rows], key=itemgetter("script")))


def check(args: argparse.Namespace) -> int:
    """Print the tables or put them into the result file, script by script; what is wrong is a line
    each on stderr, and the status 1."""
    columns = [
        Column("kernel", "kernel"),
        Column("precision", "precisions", text=True),
        Column("constants", "constants", text=True),
        *(Column(title, field, "g") for title, field in zip(COLUMNS, FIELDS, strict=True)),
    ]
    status = 0
    for name in args.scripts or SCRIPTS:
        for backend, group in itertools.groupby(args.target, lambda t: TARGETS[t][0].backend):
            targets, module = list(group), load_script(name)
            rows = rows_of(module, backend, targets, args)
            wrong = [f"{row['script']}: {row['error']}" for row in rows if row["error"]]
            say(*wrong)
            status = 1 if wrong else status
            if args.write and not wrong:
                save(rows)
            for target in () if args.write else targets:
                of_target = [row for row in rows if row.get("target") == target]
                print(f"{module.SCRIPT}, on {target}:\n\n{render(columns, of_target)}\n")
    return status


def summary(path: Path) -> int:
    """Print a row for each script and target: what its kernels need at most; returns the status."""
    rows: dict[tuple, list[dict]] = {}
    executed = {code for row in read_json(EXECUTED)["rows"] for code in row["codes"]}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                row |= {name: float(row[name]) for name in FIELDS}
                row["registers"] = row["vgprs"] + row["agprs"]
                row["executed"] = row["code"] in executed
                row["stale"] = row["source"] != sources_of(row["script"]).get(row["kernel"])
                rows.setdefault((row["script"], row["target"]), []).append(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ToolError(f"{path}: {error!r}") from error

    def number(name: str) -> Column:
        return Column(name, lambda rows: sum(row[name] for row in rows), "d")

    def most(name: str, shown: Callable[[dict], str]) -> Callable[[list[dict]], str]:
        def cell(rows: list[dict]) -> str:
            row = max(rows, key=lambda row: row[name])
            return f"{shown(row)} ({row['kernel']})"

        return cell

    lds = most("lds", lambda row: f"{row['lds'] / 1024:.3g} of {TARGETS[row['target']][1]}")
    registers = most("registers", lambda row: f"{row['registers']:g} of 512")
    columns = [
        Column("script", lambda rows: rows[0]["script"]),
        Column("GPU", lambda rows: rows[0]["target"], text=True),
        Column("kernels", lambda rows: len({row["kernel"] for row in rows})),
        Column("rows", len),
        number("executed"),
        number("stale"),
        Column("spills", lambda rows: sum(row["spills"] + row["sgpr_spills"] for row in rows), "g"),
        Column("LDS at most, KiB", lds, text=True),
        Column("VGPRs and AGPRs at most", registers, text=True),
        Column("fewest waves", lambda rows: min(row["waves"] for row in rows), "g"),
    ]
    print(render(columns, list(rows.values())))
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)

    def add(flag: str, default: list[str], choices: Iterable[str], remark: str = "all") -> None:
        text = f"of {', '.join(choices)} (default: {remark})"
        parser.add_argument(
            flag, nargs="+", choices=list(choices), default=default, metavar="NAME", help=text
        )

    parser.add_argument("scripts", nargs="*", metavar="SCRIPT.py", help="(default: all from V3 on)")
    add("--target", USUAL, TARGETS, ", ".join(USUAL))
    add("--dtype", list(PRECISIONS), PRECISIONS)
    add("--size", SIZE_NAMES, SIZE_NAMES)
    text = "block sizes of one kernel, as the scripts take them (may be repeated); "
    text += "only such kernels are compiled"
    parser.add_argument("--blocks", action="append", metavar="KERNEL:NAME=NUMBER,...", help=text)
    what = parser.add_mutually_exclusive_group()
    text = f"put default and wide sizes of the scripts into {REGISTERS.name}"
    what.add_argument("--write", action="store_true", help=text)
    text = "print what such a file says of each script and target (default: the one in results/)"
    what.add_argument("--summary", nargs="?", type=Path, const=REGISTERS, metavar="FILE", help=text)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.write:
        args.dtype, args.size = ["float32", "bfloat16"], ["default", "wide"]  # what the file has
    return summary(args.summary) if args.summary else check(args)


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
