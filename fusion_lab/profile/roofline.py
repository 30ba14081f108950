"""FLOPs, bytes and times of the parts of a model or of a training step, the rates that follow, and
their picture.

A part is a kind of module (`layers.*.mlp`) in one forward pass, or a group of operators (GEMM,
attention, ...) in a whole training step. `trainer` is the Trainer of a version script throughout.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fusion_lab.cli import ToolError
from fusion_lab.host import free_memory, is_out_of_memory
from fusion_lab.profile.ceilings import Ceilings, measure_ceilings
from fusion_lab.profile.kernels import (
    CATEGORIES,
    NO_KERNELS,
    category,
    check_events,
    complete,
    has_gpu,
    kernels_of,
    range_of_each,
    ranges_of,
    self_times,
    short_name,
)
from fusion_lab.records import ForwardFlops, read
from fusion_lab.runs import Run, only_file
from fusion_lab.script import interpret_without_gpu, measured_with
from fusion_lab.show import Column, drawing, render, save_figure, side_columns

if TYPE_CHECKING:  # where it is missing, --help of the programs works
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

WHOLE = "forward"  # the profiler's range of a model; modules have those of their names
WARMUP, STEPS = 2, 3  # training steps before and under the profiler
TOP = 12  # kernels in the table and the picture of a ROCm profile


def flop_counter() -> FlopCounterMode:
    """torch's counter, with the one fused attention that it does not know: that of CPUs."""
    import torch

    interpret_without_gpu()  # it imports Triton
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def forward(query, key, value, *unused, out_shape=None, **options) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad, query, key, value, *unused, out_shape=None, **options) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    name = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {
        getattr(torch.ops.aten, name): forward,
        getattr(torch.ops.aten, f"{name}_backward"): backward,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def profiled(trainer, read: Callable[[list[dict]], Counter]) -> Counter:
    """Milliseconds of a training step by what `read` makes of its events: the mean of STEPS steps
    after a warm-up, each in a trace of its own."""
    from fusion_lab.profile.steps import profiled_steps

    for _ in range(WARMUP):
        trainer.step()
    spent: Counter = Counter()
    for _ in range(STEPS):
        events = check_events(profiled_steps(trainer)[1], "the profiler")
        if trainer.gpu and not has_gpu(events):
            raise ToolError(NO_KERNELS, status=1)
        spent.update(read(events))
    return Counter({what: ms / STEPS for what, ms in spent.items()})


# --- kinds of modules, one forward pass


def module_kinds(model: nn.Module) -> dict[str, str]:
    """The modules that get a row, as {qualified name: kind}: the model, its children, and those of
    repeated blocks."""
    from torch import nn

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
    """Counts that include inner modules -> counts per kind that include none of those that have a
    row themselves."""
    own = Counter({name: inclusive.get(name, 0) for name in kinds})
    for name in kinds:
        if (outer := enclosing(name, kinds)) is not None:
            own[outer] -= inclusive.get(name, 0)
    total: Counter = Counter()
    for name, kind in kinds.items():
        total[kind] += own[name]
    return total


def count_modules(
    trainer, kinds: dict[str, str], no_work: tuple[str, ...]
) -> tuple[Counter, int, Counter]:
    """FLOP of one forward pass per kind of module, FLOP of forward and backward, bytes of the
    forward per kind."""
    from fusion_lab.profile.traffic import Traffic

    batch, root = trainer.next_batch(), type(trainer.model).__name__
    with flop_counter() as counter:
        with Traffic(trainer.model, kinds, no_work) as traffic, trainer.autocast():
            loss = trainer.model(**batch)
        counts = counter.get_flop_counts()
        places = {name: f"{root}.{name}" if name else root for name in kinds}
        inclusive = {name: sum(counts.get(at, {}).values()) for name, at in places.items()}
        loss.backward()
    trainer.model.zero_grad(set_to_none=True)
    moved: Counter = Counter()
    for name, amount in traffic.bytes_of.items():
        moved[kinds[name]] += amount
    return without_children(inclusive, kinds), counter.get_total_flops(), moved


def module_times(trainer, kinds: dict[str, str]) -> Counter:
    """Milliseconds of one forward pass per kind of module, without the inner modules that have a
    row themselves."""
    names = {name or WHOLE: kind for name, kind in kinds.items()}
    return profiled(trainer, lambda events: times_in_ranges(events, names))


def times_in_ranges(events: Sequence[dict], kinds: Mapping[str, str]) -> Counter:
    """Milliseconds of each kind in the ranges of these names, but not in a range inside: of
    kernels, or without a GPU of the host."""
    ranges = ranges_of(events, kinds)
    spent: Counter = Counter()
    if has_gpu(events):
        kernels = kernels_of(events)
        for name, kernel in zip(range_of_each(kernels, ranges), kernels, strict=True):
            if name is not None:
                spent[kinds[name]] += kernel.duration_ns / 1e6
        return spent
    spans = [(None, part.start, part.end - part.start) for part in ranges]
    for part, us in zip(ranges, self_times(spans), strict=True):
        spent[kinds[part.name]] += us / 1e3
    return spent


def module_rows(
    model: nn.Module,
    kinds: dict[str, str],
    flop: Counter,
    moved: Counter | None,
    spent: Counter | None,
    ceilings: Ceilings | None,
) -> list[dict]:
    """A row for each kind of module, in the order of the model; None for what was not measured."""
    rows: dict[str, dict] = {}
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        # the others' parameters are in their rows
        rest = any(enclosing(other, kinds) == name for other in kinds)
        row = rows.setdefault(kind, {"module": kind, "blocks": 0, "parameters": 0})
        row["blocks"] += 1
        row["parameters"] += sum(each.numel() for each in module.parameters(recurse=not rest))
    for kind, row in rows.items():
        row |= {"flop": flop[kind], "share_percent": 100 * flop[kind] / flop.total()}
        counted = (None if values is None else values[kind] for values in (moved, spent))
        row |= rates(flop[kind], *counted, ceilings)
    return list(rows.values())


def load_modules(directory: Path) -> Run:
    """What run_deepspeed_flops.py left in a folder."""
    path = only_file(directory, "*_flops.json", "no <script>_flops.json")
    return Run(path.stem, path, read(ForwardFlops, path))


def modules_table(sides: Mapping[str, Run]) -> str:
    """FLOP and bytes of a forward pass, module by module, of the sides that have these names."""
    modules: dict[str, dict] = defaultdict(dict)
    for label, side in sides.items():
        for row in side.result["modules"]:
            modules[row["module"]] |= {"module": row["module"], label: row}
    columns = [
        Column("module", "module"),
        *side_columns("{} GFLOP", sides, lambda row: row["flop"] / 1e9, ".4f"),
        *side_columns("{} MB", sides, lambda row: row["bytes"] and row["bytes"] / 1e6, ".2f"),
        *side_columns("{} FLOP/byte", sides, "flop_per_byte", ".2f"),
    ]
    results = [side.result for side in sides.values()]
    flop = " and ".join(f"{sum(m['flop'] for m in r['modules']) / 1e9:.4f}" for r in results)
    by = " and ".join(dict.fromkeys(result["flops_counted_by"] for result in results))
    table = render(columns, [*modules.values()])
    return f"{table}\n\nA forward pass: {flop} GFLOP, counted by {by}."


# --- groups of operators, a whole training step


def group_flops(module: ModuleType, args: argparse.Namespace, device: torch.device) -> Counter:
    """FLOP of the matrix products of one training step, for the group that computes them here.

    All of them are counted on the model with everything off, as the scripts count their "FLOPs per
    step": what a fused kernel multiplies is what its unfused parts multiply, and a counter does not
    see into our own kernels. Attention has what PyTorch's GEMM operators no longer compute once its
    fused kernels are on; GEMM has the rest.
    """
    batch = module.make_batches(args, device, args.seed).next_batch()
    flop = Counter({"GEMM": module.count_flops(args, batch)})
    names = [name for flag, name, _ in module.FUSIONS if "attention" in flag]
    if fused := {name: True for name in names if getattr(args, name)}:
        trainer = module.Trainer(module.all_off(args, **fused)).build()
        with flop_counter() as counter:
            with trainer.autocast():
                loss = trainer.model(**trainer.next_batch())
            loss.backward()
        seen = 0
        for operator, count in counter.get_flop_counts()["Global"].items():
            seen += count if category(f"aten::{operator.__name__}") == "GEMM" else 0
        flop = Counter({"GEMM": seen, "attention": flop["GEMM"] - seen})
    return flop


def group_bytes(trainer, no_work: tuple[str, ...]) -> Counter:
    """Bytes that the operators of one training step read and write, per group."""
    from fusion_lab.profile.traffic import OPTIMIZER, bytes_of_a_step

    moved: Counter = Counter()
    for operator, amount in bytes_of_a_step(trainer, no_work).items():
        moved[OPTIMIZER if operator == OPTIMIZER else category(operator)] += amount
    return moved


def times_of_operators(events: Sequence[dict]) -> Counter:
    """Milliseconds per group of the operator that launched each kernel, as bytes are counted by
    operator, too; where a trace does not tell it, or V4 launched itself, of the kernel's name."""
    calls = complete(events, "cpu_op")
    names = {call.get("args", {}).get("External id"): call["name"] for call in calls}
    names.pop(None, None)
    spent: Counter = Counter()
    for kernel in kernels_of(events):
        name = names.get(kernel.operator, "")
        known = "::" in name and not name.startswith("autograd::")
        spent[category(name if known else kernel.name)] += kernel.duration_ns / 1e6
    return spent


def make_row(
    names: dict, flop: Counter, key: str, moved: int, ms: float | None, ceilings: Ceilings | None
) -> dict:
    """A row of a training step: its names, FLOP with its share of all, bytes, time and rates."""
    share = 100 * flop[key] / flop.total() if flop.total() else 0.0
    gb_per_s = moved / ms / 1e6 if moved and ms else None
    of_copy = 100 * gb_per_s / ceilings.copy_gb_per_s if gb_per_s else None
    row = {**names, "flop": flop[key], "share_percent": share}
    row |= rates(flop[key], moved, ms, ceilings)
    return row | {"gb_per_s": gb_per_s, "percent_of_copy": of_copy}


def measure_groups(module: ModuleType, args: argparse.Namespace) -> tuple[dict, list[dict]]:
    """What a script was measured with, ceilings among it, and a row for each group of operators of
    a step that has anything; the step is launched kernel by kernel.

    Raises:
        ToolError: out of memory; torch.compile, which leaves no operators to count bytes of.
    """
    if args.torch_compile:
        raise ToolError("--enable-torch-compile does not fit here: it leaves no operators to count")
    args.cuda_graph = False
    print(f"{module.SCRIPT}: counting and measuring", file=sys.stderr)
    device = module.prepare(args)
    try:
        flop = group_flops(module, args, device)
        free_memory()
        trainer = module.Trainer(args).build()
        spent = profiled(trainer, times_of_operators)
        moved = group_bytes(trainer, module.NO_WORK)
        ceilings = measure_ceilings(args, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        remedy = "lower --batch-size or --seq-len"
        raise ToolError(f"{module.SCRIPT}: out of memory: {remedy}", status=3) from error
    groups = [group for group in CATEGORIES if flop[group] or moved[group] or spent[group]]
    names = {group: {"script": module.SCRIPT, "group": group.lower()} for group in groups}
    rows = [make_row(names[g], flop, g, moved[g], spent[g], ceilings) for g in groups]
    result = measured_with(module, args, trainer.model.config, device)
    del trainer
    free_memory()
    return {**result, "ceilings": asdict(ceilings)}, rows


def table(rows: Sequence[dict], name: str) -> str:
    """Rows of `make_row` in Markdown; `name` is the column that names them beside their group."""

    def named(row: dict) -> str:
        return f"`{short_name(row[name], 45)}`" if name == "kernel" else row[name]

    columns = [
        Column(name, named),
        Column("group", "group", text=True),
        Column("GFLOP", lambda row: row["flop"] / 1e9, ".4f"),
        Column("share", "share_percent", ".1f", " %"),
        Column("MB moved", lambda row: row["bytes"] / 1e6, ".2f"),
        Column("FLOP/byte", lambda row: row["flop_per_byte"] or None, ".2f"),
        Column("ms", "ms", ".3f"),
        Column("TFLOP/s", "achieved_tflops", ".4g"),
        Column("of roof", "percent_of_roof", ".1f", " %"),
        Column("GB/s", "gb_per_s", ".4g"),
        Column("of copy", "percent_of_copy", ".1f", " %"),
    ]
    return render(columns, rows)


# --- both


def rates(
    flop: int, moved: int | None = None, ms: float | None = None, ceilings: Ceilings | None = None
) -> dict:
    """Bytes, time and rates of a part as columns of its row, None where not measured, or without
    FLOP or time. The roof of a part that multiplies nothing is the rate of a copy."""
    intensity = flop / moved if moved else None
    achieved = flop / ms / 1e9 if flop and ms and intensity and ceilings else None
    roof = ceilings.roof(intensity) if achieved else None
    share = achieved / roof if achieved else None
    if moved and ms and ceilings and not flop:
        share = moved / ms / 1e6 / ceilings.copy_gb_per_s
    return {
        "bytes": moved,
        "flop_per_byte": intensity,
        "ms": ms,
        "achieved_tflops": achieved,
        "roof_tflops": roof,
        "percent_of_roof": None if share is None else 100 * share,
    }


def draw(path: Path, title: str, rows: dict[str, dict], ceilings: Ceilings) -> None:
    """The roofline as PNG, TFLOP/s over FLOP per byte: both ceilings, and a point for each row with
    FLOP and time."""
    figure, axes = drawing().subplots(figsize=(10, 6), layout="constrained")
    from matplotlib import ticker

    points = {label: row for label, row in rows.items() if row["achieved_tflops"]}
    places = [row["flop_per_byte"] for row in points.values()]
    places += [ceilings.ridge] if ceilings.gemm_tflops else [] if places else [1.0]
    low, high = min(places) / 3, max(places) * 10
    bandwidth = f"copy {ceilings.copy_gb_per_s:.4g} GB/s"
    ridge = min(ceilings.ridge, high)
    roof = [ceilings.roof(low), ceilings.roof(ridge)]
    axes.plot([low, ridge], roof, color="black", label=bandwidth)
    if top := ceilings.gemm_tflops:
        peak = f"GEMM {top:.3g} TFLOP/s ({ceilings.precision})"
        axes.plot([ridge, high], [top, top], color="black", linestyle="--", label=peak)
    for index, (label, row) in enumerate(points.items()):
        marker = "osD^v<>Ph*X8p"[index % 13]
        style = {"color": f"C{index % 10}", "label": label}
        axes.plot(row["flop_per_byte"], row["achieved_tflops"], marker, **style)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="TFLOP/s")
    # 10, 20, 50 in place of powers of ten alone, where there is room
    for axis in (axes.xaxis, axes.yaxis):
        first, last = axis.get_view_interval()
        digits = (1, 2, 5) if last < 1e4 * first else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=digits, numticks=20))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.2)
    figure.legend(loc="outside right center", fontsize="small")
    figure.suptitle(title)
    save_figure(figure, path)
