#!/usr/bin/env python3
"""Floating-point operations, memory traffic and a roofline, module by module, of one forward pass of a version script.

Everything is of the model as the arguments choose it, fusions included, not of the unfused model that the script's own
"FLOPs per step" is counted on. FLOPs are counted by DeepSpeed where that package is installed, which counts some
element-wise operators too; otherwise by torch.utils.flop_counter: matrix multiplications and fused attention (causal
attention as if it were full) and nothing else. Modules of repeated blocks are added up: `layers.*.mlp`. What a block or
the model computes outside of the modules listed, such as residuals and the loss, is its "(rest)".

--computational-intensity adds FLOP per byte. Its model of memory: every operator reads its tensors from device memory
and writes its results there, once each; views cost nothing, and looking up rows reads these rows only. This is the
traffic if nothing stays in a cache between two operators. What one fused kernel keeps to itself costs nothing, and that
is why fusing raises the intensity. A module may exceed the roof where caches do hold its data.

--generate-roofline measures two ceilings here, a large GEMM in the run's precision and a large copy, and the time of
each module in the forward pass of training steps: on a GPU the sum of its kernels, on a CPU the time spent in the
module, the profiler's own cost included. Only what counts as FLOP makes a module fast here; one without any is not in
the picture.

Written to --profile-dir: <script>_flops.json and .csv with all numbers, <script>_roofline.png, and with DeepSpeed its
own profile, <script>_deepspeed_flops.txt.

Examples:
  python run_deepspeed_flops.py --batch-size 8 --seq-len 64 --computational-intensity --generate-roofline
  python run_deepspeed_flops.py --script tiny_llama_v2.py --use-amp --generate-roofline --profile-dir ./roofline
  python run_deepspeed_flops.py --script tiny_llama_v1.py --seq-len 512 --computational-intensity
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as the scripts do, before torch.utils.flop_counter imports Triton
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from profiling.ceilings import Ceilings, measure_ceilings
from profiling.kernels import has_gpu, kernels_of, range_of_each, ranges_of
from profiling.program import (
    ToolError,
    drawing,
    load_script,
    markdown_table,
    print_notes,
    run_tool,
    script_arguments,
    tool_parser,
    write_csv,
    write_file,
    write_text,
)
from profiling.traffic import Traffic

PROG = Path(__file__).name
RANGE = "module "  # what the names of the profiler's ranges begin with
WARMUP, STEPS = 2, 3  # training steps before and under the profiler
NOT_SEEN = ("triton-attention", "triton-triangle", "triton-outer-product", "swiglu-gemm")  # they multiply matrices


@dataclass
class Row:
    """One kind of module in one forward pass; times and rates are None if they were not asked for."""

    module: str
    blocks: int
    parameters: int
    flop: int = 0
    share_percent: float = 0.0
    bytes: int | None = None
    flop_per_byte: float | None = None
    ms: float | None = None
    achieved_tflops: float | None = None
    roof_tflops: float | None = None
    percent_of_roof: float | None = None


def module_kinds(model: nn.Module) -> dict[str, str]:
    """The modules that get a row, as {qualified name: kind}: the model, its children, and those of repeated blocks."""
    kinds = {"": "model (rest)"}
    for name, child in model.named_children():
        if not isinstance(child, (nn.ModuleList, nn.Sequential)):
            kinds[name] = name
            continue
        for index, block in child.named_children():
            parts = [part for part, _ in block.named_children()]
            kinds[f"{name}.{index}"] = f"{name}.* (rest)" if parts else f"{name}.*"
            kinds |= {f"{name}.{index}.{part}": f"{name}.*.{part}" for part in parts}
    return kinds


def enclosing(name: str, kinds: dict[str, str]) -> str | None:
    """The innermost other module of `kinds` around this one; None for the model itself."""
    while name:
        name = name.rpartition(".")[0]
        if name in kinds:
            return name
    return None


def without_children(inclusive: dict[str, int], kinds: dict[str, str]) -> Counter:
    """Counts that include inner modules -> counts per kind that include none of those that have a row themselves."""
    own = Counter({name: inclusive.get(name, 0) for name in kinds})
    for name in kinds:
        if (outer := enclosing(name, kinds)) is not None:
            own[outer] -= inclusive.get(name, 0)
    total: Counter = Counter()
    for name, kind in kinds.items():
        total[kind] += own[name]
    return total


def flop_counter() -> FlopCounterMode:
    """torch's counter, with the one fused attention that it does not know: that of CPUs."""

    def forward(query, key, value, *unused, out_shape=None, **options) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad, query, key, value, *unused, out_shape=None, **options) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    name = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {getattr(torch.ops.aten, name): forward, getattr(torch.ops.aten, f"{name}_backward"): backward}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def count(trainer, kinds: dict[str, str], no_work: tuple[str, ...]) -> tuple[Counter, int, Counter]:
    """FLOP of one forward pass per kind of module, FLOP of forward and backward, bytes of the forward per kind."""
    batch, root = trainer.next_batch(), type(trainer.model).__name__
    with flop_counter() as counter:
        with Traffic(trainer.model, kinds, no_work) as traffic, trainer.autocast():
            loss = trainer.model(**batch)
        counts = counter.get_flop_counts()
        inclusive = {name: sum(counts.get(f"{root}.{name}" if name else root, {}).values()) for name in kinds}
        loss.backward()
    trainer.model.zero_grad(set_to_none=True)
    moved: Counter = Counter()
    for name, amount in traffic.bytes_of.items():
        moved[kinds[name]] += amount
    return without_children(inclusive, kinds), counter.get_total_flops(), moved


def find_deepspeed() -> ModuleType | None:
    """DeepSpeed's profiler, or None where it is not installed or cannot be used; the latter is said on stderr."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            from deepspeed.profiling.flops_profiler import profiler
        return profiler
    except Exception as error:  # it looks for compilers when imported, and what it raises then is its own
        print(f"{PROG}: DeepSpeed is installed but cannot be imported ({error}); counting without it", file=sys.stderr)
        return None


def count_with_deepspeed(profiler: ModuleType, trainer, kinds: dict[str, str], path: Path) -> Counter:
    """FLOP of one forward pass per kind of module as DeepSpeed counts them; its own profile goes to `path`."""
    deepspeed = profiler.FlopsProfiler(trainer.model)
    deepspeed.start_profile()
    try:
        with trainer.autocast():
            trainer.model(**trainer.next_batch())
        deepspeed.print_model_profile(output_file=str(path))
        modules = dict(trainer.model.named_modules())
        inclusive = {name: profiler.get_module_flops(modules[name]) for name in kinds}
    finally:
        deepspeed.end_profile()
    return without_children(inclusive, kinds)


@contextlib.contextmanager
def named_ranges(model: nn.Module, kinds: dict[str, str]) -> Iterator[None]:
    """Make each forward pass of these modules a range of the profiler."""
    open_ranges, handles = [], []

    def enter(kind: str) -> Callable:
        def hook(*unused) -> None:
            open_ranges.append(torch.profiler.record_function(RANGE + kind))
            open_ranges[-1].__enter__()

        return hook

    def leave(*unused) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        if name in kinds:
            handles += [module.register_forward_pre_hook(enter(kinds[name])), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def module_times(trainer, kinds: dict[str, str]) -> dict[str, float]:
    """Milliseconds of one forward pass per kind of module, without the inner modules that have a row themselves."""
    for _ in range(WARMUP):
        trainer.step()
    spent: Counter = Counter()
    for _ in range(STEPS):
        with named_ranges(trainer.model, kinds):
            events = trainer.trace(trainer.profile())["traceEvents"]
        if trainer.gpu and not has_gpu(events):
            raise ToolError("the profiler saw no kernels on the GPU: may this user profile it?", status=1)
        spent.update(times_in_ranges(events, kinds.values()))
    return {kind: ms / STEPS for kind, ms in spent.items()}


def times_in_ranges(events: Sequence[dict], kinds: Iterable[str]) -> Counter:
    """Milliseconds in the ranges of each kind but not in a range inside: of kernels, or without a GPU of the host."""
    ranges = ranges_of(events, {RANGE + kind for kind in kinds})
    spent: Counter = Counter()
    if has_gpu(events):
        kernels = kernels_of(events)
        for name, kernel in zip(range_of_each(kernels, ranges), kernels, strict=True):
            if name is not None:
                spent[name.removeprefix(RANGE)] += kernel.duration_ns / 1e6
        return spent
    outer = []
    for inner in ranges:
        while outer and outer[-1].end <= inner.start:
            outer.pop()
        duration = (inner.end - inner.start) / 1e3
        spent[inner.name.removeprefix(RANGE)] += duration
        if outer:
            spent[outer[-1].name.removeprefix(RANGE)] -= duration
        outer.append(inner)
    return spent


def make_rows(model: nn.Module, kinds: dict[str, str], flop: Counter) -> list[Row]:
    """A row for each kind of module, in the order of the model."""
    rows: dict[str, Row] = {}
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        rest = any(enclosing(other, kinds) == name for other in kinds)  # the others' parameters are in their rows
        row = rows.setdefault(kind, Row(kind, 0, 0))
        row.blocks += 1
        row.parameters += sum(parameter.numel() for parameter in module.parameters(recurse=not rest))
    total = sum(flop.values())
    for kind, row in rows.items():
        row.flop = flop[kind]
        row.share_percent = 100 * flop[kind] / total
    return list(rows.values())


def add_intensity(rows: Sequence[Row], moved: Counter) -> None:
    """Fill in bytes and FLOP per byte."""
    for row in rows:
        row.bytes = moved[row.module]
        row.flop_per_byte = row.flop / row.bytes if row.bytes else None


def add_rates(rows: Sequence[Row], spent: dict[str, float], ceilings: Ceilings) -> None:
    """Fill in times, rates, and the roof at each intensity: the lower of GEMM throughput and bandwidth x intensity."""
    for row in rows:
        row.ms = spent.get(row.module, 0.0)
        if row.flop and row.ms and row.flop_per_byte:
            row.achieved_tflops = row.flop / row.ms / 1e9
            row.roof_tflops = min(ceilings.gemm_tflops, ceilings.copy_gb_per_s * row.flop_per_byte / 1e3)
            row.percent_of_roof = 100 * row.achieved_tflops / row.roof_tflops


def table(rows: Sequence[Row], intensity: bool, roofline: bool) -> str:
    """The rows as a Markdown table."""

    def cell(value: float | None, digits: int, unit: float = 1.0) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    header = ["module", "blocks", "parameters", "GFLOP forward", "share"]
    header += ["MB moved", "FLOP/byte"] if intensity else []
    header += ["ms", "TFLOP/s", "roof", "of roof"] if roofline else []
    lines = []
    for row in rows:
        line = [
            row.module,
            str(row.blocks),
            f"{row.parameters:,}",
            cell(row.flop, 4, 1e9),
            f"{row.share_percent:.1f} %",
        ]
        if intensity:
            line += [cell(row.bytes, 2, 1e6), cell(row.flop_per_byte, 2)]
        if roofline:
            share = "-" if row.percent_of_roof is None else f"{row.percent_of_roof:.1f} %"
            line += [cell(row.ms, 3), cell(row.achieved_tflops, 3), cell(row.roof_tflops, 3), share]
        lines.append(line)
    return markdown_table(header, lines)


def draw(path: Path, title: str, rows: Sequence[Row], ceilings: Ceilings) -> None:
    """The roofline as a PNG: both ceilings, and a point for each kind of module that has FLOPs and a time."""
    pyplot = drawing()
    from matplotlib import ticker

    points = [row for row in rows if row.achieved_tflops]
    ridge = 1e3 * ceilings.gemm_tflops / ceilings.copy_gb_per_s  # FLOP/byte at which the two ceilings meet
    low = min(ridge, *(row.flop_per_byte for row in points)) / 3
    high = max(ridge, *(row.flop_per_byte for row in points)) * 10
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    bandwidth = f"copy {ceilings.copy_gb_per_s:.4g} GB/s"
    peak = f"GEMM {ceilings.gemm_tflops:.3g} TFLOP/s ({ceilings.precision})"
    axes.plot([low, ridge], [low * ceilings.copy_gb_per_s / 1e3, ceilings.gemm_tflops], color="black", label=bandwidth)
    axes.plot([ridge, high], 2 * [ceilings.gemm_tflops], color="black", linestyle="--", label=peak)
    axes.annotate(
        peak, (high, ceilings.gemm_tflops), ha="right", va="bottom", textcoords="offset points", xytext=(0, 3)
    )
    axes.annotate(bandwidth, (low, low * ceilings.copy_gb_per_s / 1e3), textcoords="offset points", xytext=(0, -14))
    for index, row in enumerate(points):
        marker = "osD^v<>Ph*X8p"[index % 13]
        axes.plot(row.flop_per_byte, row.achieved_tflops, marker, color=f"C{index % 10}", label=row.module)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="TFLOP/s", title=title)
    for axis in (axes.xaxis, axes.yaxis):  # 10, 20, 50 in place of powers of ten
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=20))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.2)
    figure.legend(loc="outside right upper", fontsize="small")
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150))
    pyplot.close(figure)


def measure(module: ModuleType, args: argparse.Namespace, intensity: bool, roofline: bool) -> int:
    """Count and measure what was asked for, write the files and print the table; returns the exit status."""
    device = module.prepare(args)
    environment, directory = module.environment(device), args.profile_dir
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"--profile-dir {directory}: cannot write there ({error.strerror})") from error
    trainer = module.Trainer(args, device)
    kinds = module_kinds(trainer.model)
    flop, both, moved = count(trainer, kinds, module.NO_WORK)
    source, text = "torch.utils.flop_counter", None
    if (deepspeed := find_deepspeed()) is not None:
        from deepspeed import __version__

        source, text = f"DeepSpeed {__version__}", directory / f"{module.SCRIPT}_deepspeed_flops.txt"
        flop = count_with_deepspeed(deepspeed, trainer, kinds, text)
    rows = make_rows(trainer.model, kinds, flop)
    if intensity:
        add_intensity(rows, moved)
    ceilings = None
    if roofline:
        spent = module_times(trainer, kinds)
        ceilings = measure_ceilings(args, device)
        add_rates(rows, spent, ceilings)

    if hidden := [flag for flag, name, _ in module.FUSIONS if flag in NOT_SEEN and getattr(args, name)]:
        off = " ".join(f"--disable-{flag}" for flag in hidden)
        print_notes(PROG, f"what our own kernels multiply is not counted, so FLOP and rates are too low; try {off}")
    fusions = {attribute: getattr(args, attribute) for _, attribute, _ in module.FUSIONS}
    on = ", ".join(flag for flag, attribute, _ in module.FUSIONS if getattr(args, attribute)) or "nothing"
    total = sum(flop.values())
    result = {
        "schema_version": 1,
        "script": module.SCRIPT,
        "config": asdict(trainer.model.config),
        "fusions": fusions,
        "training": {name: getattr(args, name) for name in ("batch_size", "use_amp", "amp_dtype", "matmul_precision")},
        "environment": environment,
        "flops_counted_by": source,
        "forward_flop": total,
        "forward_backward_flop": both,  # always by torch.utils.flop_counter
        "ceilings": asdict(ceilings) if ceilings else None,
        "modules": [asdict(row) for row in rows],
    }
    stem = directory / f"{module.SCRIPT}_flops"
    write_text(stem.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
    write_csv(stem.with_suffix(".csv"), [asdict(row) for row in rows])

    print(f"{module.SCRIPT} on {environment['device_name']}, batch size {args.batch_size}, fused: {on}")
    print(f"FLOPs counted by {source}, of the model with these fusions\n")
    print(table(rows, intensity, roofline) + "\n")
    print(f"Forward: {total / 1e9:.3f} GFLOP")
    print(f"Forward and backward: {both / 1e9:.3f} GFLOP (by torch.utils.flop_counter)")
    files = [stem.with_suffix(".csv"), stem.with_suffix(".json"), *([text] if text else [])]
    if ceilings:
        print(f"GEMM ceiling: {ceilings.gemm_tflops:.3f} TFLOP/s ({ceilings.precision}, size {ceilings.gemm_size})")
        print(f"Copy ceiling: {ceilings.copy_gb_per_s:.1f} GB/s (read and written)")
        files.append(directory / f"{module.SCRIPT}_roofline.png")
        draw(files[-1], f"{module.SCRIPT} forward on {environment['device_name']}", rows, ceilings)
    print(f"Written: {', '.join(map(str, files))}")
    return 0


def count_script(argv: Sequence[str] | None) -> int:
    """Parse the command line and measure; returns the exit status."""
    parser = tool_parser(PROG, __doc__)
    parser.add_argument("--computational-intensity", action="store_true", help="FLOP per byte of memory traffic")
    parser.add_argument("--generate-roofline", action="store_true", help="the same against what this device reaches")
    own, rest = parser.parse_known_args(argv)
    if own.generate_roofline and importlib.util.find_spec("matplotlib") is None:
        raise ToolError("--generate-roofline needs the package matplotlib (pip install matplotlib)", status=4)
    module = load_script(own.script)
    _, args = script_arguments(module, rest, own.profile_dir)
    for attribute in ("torch_compile", "cuda_graph"):
        if getattr(args, attribute):
            flag = f"--enable-{attribute.replace('_', '-')}"
            raise ToolError(f"{flag} does not fit here: there are no modules any more in what the device then runs")
    try:
        return measure(module, args, own.computational_intensity or own.generate_roofline, own.generate_roofline)
    except (RuntimeError, MemoryError) as error:
        if not module.is_out_of_memory(error):
            raise
        raise ToolError("out of memory: lower --batch-size or --seq-len", status=3) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_tool(PROG, lambda: count_script(argv))


if __name__ == "__main__":
    sys.exit(main())
