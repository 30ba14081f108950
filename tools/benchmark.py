#!/usr/bin/env python3
"""Take the measurements behind every figure in README.md, and print the tables from them.

Both sides of a ratio are measured in one call, in turn. `headline` runs the scripts as a user does, one process each,
and keeps their result files as they are; the others run in this process and write one file each, which replaces an
earlier one when the last row is measured. Until then the rows are in NAME.partial.json.

Examples:
  python tools/benchmark.py headline results/DIR   V1 against V2, eager and compiled, float32 and bfloat16
  python tools/benchmark.py grid results/DIR       V1 against V2 over batch sizes and sequence lengths
  python tools/benchmark.py ablation results/DIR   each fusion alone, and all but each, against none
  python tools/benchmark.py memory results/DIR     peak memory of TinyLlama against the sequence length
  python tools/benchmark.py overhead results/DIR   the measured loop against a loop of bare training steps
  python tools/benchmark.py scaling results/DIR    the same batch per GPU on one GPU; for N of them, with torchrun:
  torchrun --nproc-per-node N tools/benchmark.py scaling results/DIR
  torchrun --nproc-per-node N tools/benchmark.py ddp results/DIR    where the time goes that scaling loses
  python tools/benchmark.py table results/DIR      the README's tables, from what lies in DIR
"""

import argparse
import gc
import importlib
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from analysis_tools.results import NOT_FINISHED, cell  # noqa: E402
from tools.kernels import CATEGORIES  # noqa: E402
from tools.version_script import (  # noqa: E402
    ToolError,
    at_least,
    documented_parser,
    markdown_table,
    read_json,
    run_tool,
    write_text,
)

PROG = Path(__file__).name
MODELS = {"tiny_openfold": [], "tiny_llama": ["--seq-len", "128"]}  # the sizes of the headline table
COMPILE = ["--enable-torch-compile", "--torch-compile-mode", "reduce-overhead"]
CONFIGURATIONS = {
    "fp32": [],
    "bf16": ["--use-amp"],
    "fp32_compile": COMPILE,
    "bf16_compile": ["--use-amp", *COMPILE],
}
LABELS = {"fp32": "fp32", "bf16": "bf16", "fp32_compile": "fp32, compiled", "bf16_compile": "bf16, compiled"}
GRID = {
    "tiny_llama": [(b, s) for s in (32, 128, 512) for b in (1, 4, 16)],
    "tiny_openfold": [(b, s) for s in (32, 64, 128) for b in (1, 4, 16)] + [(1, 256), (4, 256), (1, 512)],
}
SCALING = {  # arguments and samples per GPU
    "tiny_llama": (["--seq-len", "128"], 8),
    "tiny_llama wide": (["--hidden-dim", "1024", "--num-layers", "12", "--seq-len", "512"], 16),
    "tiny_openfold": ([], 4),
    "tiny_openfold long": (["--seq-len", "128"], 8),
}
LENGTHS = (128, 256, 512, 1024, 2048)


def headline(directory: Path, rounds: int, models: list[str], versions: list[str], configurations: list[str]) -> int:
    """A result file for each model, version, configuration and round; returns how many runs failed."""
    failed = 0
    for configuration in configurations:
        for model in models:
            for turn in range(1, 1 + (1 if "compile" in configuration else rounds)):
                for version in versions:
                    script = f"{model}_{version}"
                    with tempfile.TemporaryDirectory() as folder:
                        command = [sys.executable, f"{script}.py", "--profile-dir", folder]
                        command += MODELS[model] + CONFIGURATIONS[configuration]
                        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                        if run.returncode:
                            print(f"{script} {configuration}: {run.stderr.strip()}", file=sys.stderr)
                            failed += 1
                            continue
                        text = (Path(folder) / f"{script}_summary.json").read_text()
                    write_text(directory / f"{script}_{configuration}_{turn}.json", text)
                    print(
                        f"{script} {configuration} {turn}: {json.loads(text)['timing']['batch_ms']:.2f} ms", flush=True
                    )
    return failed


def free_memory() -> None:
    """Let go of what the run before this one held on the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def short_run(script: str, argv: list[str]) -> dict:
    """Train a few steps in this process, without counting and profiling. The result is `ok` or out of memory."""
    module = importlib.import_module(script)
    with tempfile.TemporaryDirectory() as folder:
        args = module.parse_args([*argv, "--under-profiler", "--log-interval", "1000000", "--profile-dir", folder])
        result = module.train(args)
    free_memory()
    if result["exit_status"] == 130:
        raise KeyboardInterrupt
    if result["status"] == "failed":
        raise ToolError(f"{script} {' '.join(argv)}: {result['error']}", status=1)
    return result


def make_trainer(module: ModuleType, argv: list[str]):
    """The Trainer of a script for this command line, not trained yet."""
    with tempfile.TemporaryDirectory() as folder:
        args = module.parse_args([*argv, "--log-interval", "1000000", "--profile-dir", folder])
        return module.Trainer(args, module.prepare(args))


def outcome(result: dict) -> dict:
    """What `grid` and `memory` keep of a result; the numbers of a run that went out of memory are none."""
    finished = result["status"] == "ok"
    return {
        "status": result["status"],
        "batch_ms": result["timing"]["batch_ms"] if finished else None,
        "peak_mb": result["memory"].get("peak_mb") if finished else None,
    }


def grid(model: str, rounds: int) -> Iterator[dict]:
    """V1 and V2 with everything on at each batch size and length, in float32 and bfloat16, in turn; the best round."""
    for precision in ("fp32", "bf16"):
        for batch, length in GRID[model]:
            argv = ["--batch-size", str(batch), "--seq-len", str(length), "--num-steps", "12"]
            argv += CONFIGURATIONS[precision]
            row = {"precision": precision, "batch_size": batch, "seq_len": length}
            for version in ("v1", "v2") * rounds:
                got = outcome(short_run(f"{model}_{version}", argv))
                if version not in row or (got["batch_ms"] or math.inf) < (row[version]["batch_ms"] or math.inf):
                    row[version] = got
            yield row


def ablation(model: str, rounds: int) -> Iterator[dict]:
    """V2 with each fusion alone, all but each, none and all, in float32 and bfloat16, 12 steps of each in a round.

    They take turns of three steps, in an order that changes from turn to turn, because the speed of a host wanders
    within seconds. Milliseconds per step are the median of the turns. So is the speed-up over no fusion, each against
    the steps of the same turn. The kernels' time, of one profiled step, does not depend on the host.
    """
    module = importlib.import_module(f"{model}_v2")
    flags = [flag for flag, *_ in module.FUSIONS]
    sets = {"none": ["--disable-all-fusion"]}
    sets |= {f"only {flag}": ["--disable-all-fusion", f"--enable-{flag}"] for flag in flags}
    sets |= {f"all but {flag}": [f"--disable-{flag}"] for flag in flags}
    sets |= {"all": []}
    shuffled = random.Random(0)
    for precision in ("fp32", "bf16"):
        common = MODELS[model] + CONFIGURATIONS[precision]
        trainers = {name: make_trainer(module, common + fusions) for name, fusions in sets.items()}
        turns = [
            {name: statistics.fmean(step_times(trainers[name], 3)) for name in shuffled.sample([*sets], len(sets))}
            for _ in range(4 * (rounds + 1))
        ][4:]  # the first round warms up
        for name, trainer in trainers.items():
            row = {"precision": precision, "fusions": name, "argv": common + sets[name]}
            events = module.trace_events(trainer.profile())
            row |= module.count_kernels(events, trainer.device)
            if row["unit"] == "kernels":  # on a CPU nothing runs apart from the host
                row["kernel_ms"] = sum(event["dur"] for event in events if event.get("cat") == "kernel") / 1e3
            row["batch_ms"] = statistics.median(turn[name] for turn in turns)
            row["speedup"] = statistics.median(turn["none"] / turn[name] for turn in turns)
            yield row
        del trainers, trainer
        free_memory()


def memory() -> Iterator[dict]:
    """Peak memory of TinyLlama V2 with flash attention off and on, the other fusions on, batch size 4."""
    for length in LENGTHS:
        row = {"seq_len": length}
        for name, flag in (("scores", "--disable-flash-attention"), ("flash", "--enable-flash-attention")):
            argv = ["--batch-size", "4", "--seq-len", str(length), "--num-steps", "3", "--warmup-steps", "2", flag]
            row[name] = outcome(short_run("tiny_llama_v2", argv))
        yield row


def overhead() -> Iterator[dict]:
    """Time per step of the harness's measured loop over that of a loop that only takes training steps."""
    for script, argv in (("tiny_openfold_v2", []), ("tiny_llama_v2", [*MODELS["tiny_llama"], "--use-amp", *COMPILE])):
        module = importlib.import_module(script)
        trainer = make_trainer(module, argv)
        steps, measured, bare = 100, [], []
        for turn in range(9):
            recorder = module.Recorder(trainer.device, steps, "step", 10**6)
            wall = module.run_steps(trainer, recorder, {"loss": {"curve": []}})
            start = time.perf_counter()
            for _ in range(steps):
                trainer.step()
            trainer.synchronize()
            if turn:  # the first warms up
                measured.append(1e3 * wall / steps)
                bare.append(1e3 * (time.perf_counter() - start) / steps)
        row = {"script": script, "argv": argv, "measured_ms": measured, "bare_ms": bare}
        row["ratio"] = statistics.median(m / b for m, b in zip(measured, bare, strict=True))
        yield row


def join_processes(suite: str) -> int:
    """Meet the other processes that torchrun started; returns how many there are."""
    first = importlib.import_module("tiny_llama_v1")
    if first.WORLD_SIZE > 1:
        first.join_processes(first.parse_args(["--batch-size", str(first.WORLD_SIZE)]))
    elif suite == "ddp":
        raise ToolError("ddp needs several processes: torchrun --nproc-per-node N tools/benchmark.py ddp results/DIR")
    return first.WORLD_SIZE


def scaling(processes: int, rounds: int) -> Iterator[dict]:
    """V1 and V2 with the same batch per GPU, on the GPUs that torchrun gave processes to; the best round."""
    for name, precision, argv in scaling_shapes(processes):
        row = {"name": name, "precision": precision, "argv": argv}
        for version in ("v1", "v2") * rounds:
            result = short_run(f"{name.split()[0]}_{version}", [*argv, "--num-steps", "12"])
            if result["status"] != "ok":
                raise ToolError(f"{name} {precision}: {result['error']}", status=3)
            timing = result["timing"]
            if timing["batch_ms"] < row.get(version, timing | {"batch_ms": math.inf})["batch_ms"]:
                row[version] = {key: timing[key] for key in ("batch_ms", "samples_per_sec", "backward_ms")}
        yield row


def scaling_shapes(processes: int) -> Iterator[tuple[str, str, list[str]]]:
    """Name, precision and arguments of each row of `scaling`."""
    for name, (sizes, per_gpu) in SCALING.items():
        for precision in ("fp32", "bf16"):
            yield name, precision, [*sizes, *CONFIGURATIONS[precision], "--batch-size", str(per_gpu * processes)]


def ddp(processes: int, rounds: int) -> Iterator[dict]:
    """The same training steps on one GPU while the others idle, on all of them without DDP, and with it; in turn.

    Of the steps on all GPUs without DDP, `slowest` is the mean over the steps of the longest one among the processes:
    what a step would take if nothing but waiting for each other were added. Milliseconds per step of rank 0, the
    median of the rounds. Only shapes and precisions that scale below 0.95 or are limited by the host.
    """
    import torch

    idle = torch.distributed.new_group(backend="gloo")  # NCCL's barrier would keep a core and the GPU busy
    for name, precision, argv in scaling_shapes(processes):
        if precision == "fp32" and len(name.split()) > 1:
            continue
        for version in ("v1", "v2"):
            module = importlib.import_module(f"{name.split()[0]}_{version}")
            trainer = make_trainer(module, argv)
            forward = {"alone": trainer.model, "together": trainer.model, "ddp": trainer.forward}
            times: dict[str, list[float]] = {kind: [] for kind in (*forward, "slowest")}
            for turn in range(rounds + 1):
                for kind, trainer.forward in forward.items():
                    torch.distributed.barrier(idle)
                    steps = step_times(trainer, 12) if kind != "alone" or module.RANK == 0 else []
                    everyone: list = [None] * processes
                    torch.distributed.all_gather_object(everyone, steps, idle)
                    if turn:  # the first warms up
                        times[kind].append(statistics.fmean(everyone[0]))
                    if turn and kind == "together":
                        times["slowest"].append(statistics.fmean(map(max, zip(*everyone, strict=True))))
            del trainer, forward
            free_memory()
            row = {"name": name, "precision": precision, "version": version, "argv": argv}
            yield {**row, **{f"{kind}_ms": statistics.median(values) for kind, values in times.items()}}


def step_times(trainer, steps: int) -> list[float]:
    """Milliseconds of each training step on the host's clock; the last one waits for the device."""
    trainer.synchronize()
    moments = [time.perf_counter()]
    for _ in range(steps):
        trainer.step()
        moments.append(time.perf_counter())
    trainer.synchronize()
    moments[-1] = time.perf_counter()
    return [1e3 * (after - before) for before, after in itertools.pairwise(moments)]


def write_rows(path: Path, measured: Iterable[dict], **more: int) -> None:
    """Print the rows as they are measured, and write them with what they were measured on; of several processes, one.

    They are in NAME.partial.json until the last one is there, so that an earlier result is replaced by a whole one.
    """
    import torch

    first = importlib.import_module("tiny_llama_v1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    partial, rows = path.with_suffix(".partial.json"), []
    for row in measured:
        rows.append(row)
        if first.RANK == 0:
            print(row, flush=True)
            content = {"environment": first.environment(device), **more, "rows": rows}
            write_text(partial, json.dumps(content, indent=1) + "\n")
    if first.RANK == 0:
        partial.replace(path)


def median_round(directory: Path, script: str, configuration: str) -> dict | None:
    """Of the rounds of one configuration, the result with the median speed."""
    results = [read_json(path) for path in directory.glob(f"{script}_{configuration}_[0-9].json")]
    results.sort(key=lambda result: result["timing"]["batch_ms"])
    return results[len(results) // 2] if results else None


def read_rows(path: Path) -> list[dict]:
    """The rows of a result file of this tool; none if it is not there."""
    return read_json(path)["rows"] if path.exists() else []


def share_table(directory: Path) -> str:
    """What the kernels of a step do, from the profiles of run_pytorch_profiler.py that lie in the directory."""
    profiles = [read_json(path) for path in sorted(directory.glob("profile_tiny_*.json"))]
    if not profiles:
        return ""
    lines = []
    for name in CATEGORIES:
        if any(name in profile["categories"] for profile in profiles):
            shares = (profile["categories"].get(name, {"percent": 0.0})["percent"] for profile in profiles)
            lines.append([name, *(f"{share:.1f} %" for share in shares)])
    lines.append(["kernel time, ms", *(f"{profile['ms_per_step']:.2f}" for profile in profiles)])
    return markdown_table(["share of kernel time", *(profile["script"] for profile in profiles)], lines)


def scaling_table(directory: Path) -> str:
    """Weak scaling: samples per second and GPU over those of one GPU."""
    runs = [read_rows(directory / f"scaling_{n}.json") for n in (1, 2, 4)]
    if not all(runs):
        return ""
    lines = []
    for rows in zip(*runs, strict=True):
        one, *more = rows
        ratios = (
            row[version]["samples_per_sec"] / one[version]["samples_per_sec"] / n
            for n, row in zip((2, 4), more, strict=True)
            for version in ("v1", "v2")
        )
        lines.append([described(one["name"], one["precision"]), *(f"{ratio:.2f}" for ratio in ratios)])
    header = [f"{n} GPUs, {version}" for n in (2, 4) for version in ("V1", "V2")]
    return markdown_table(["same batch per GPU", *header], lines)


def described(name: str, precision: str) -> str:
    """A row of `scaling` in words."""
    sizes, per_gpu = SCALING[name]
    return f"{name.split()[0]}, {' '.join(sizes) or 'default sizes'}, {per_gpu} per GPU, {precision}"


def ddp_table(directory: Path) -> str:
    """What a step on several GPUs consists of."""
    rows = read_rows(directory / "ddp_4.json")
    if not rows:
        return ""
    lines = [
        [
            f"{described(row['name'], row['precision'])}, {row['version'].upper()}",
            *(f"{row[kind]:.1f}" for kind in ("alone_ms", "together_ms", "slowest_ms", "ddp_ms")),
        ]
        for row in rows
    ]
    header = ["ms per step", "one GPU, others idle", "all, without DDP", "slowest of them", "all, with DDP"]
    return markdown_table(header, lines)


def headline_table(directory: Path, model: str) -> str:
    """Speed, kernels, memory and loss of each configuration of a model."""
    lines: list[list[str]] = []
    base, unit = None, "kernels"
    for configuration, label in LABELS.items():
        for version in ("v1", "v2"):
            result = median_round(directory, f"{model}_{version}", configuration)
            if not result:
                continue
            speed = result["timing"]["samples_per_sec"]
            base, unit = base or speed, result["kernels"]["unit"]
            lines.append(
                [
                    f"{version.upper()} {label}",
                    f"{speed:.0f}",
                    f"{result['timing']['batch_ms']:.2f}",
                    str(result["kernels"]["per_step"]),
                    str(result["kernels"].get("host_launches", "-")),  # a CPU launches nothing
                    f"{result['memory']['peak_mb']:.0f}",
                    f"{result['loss']['final']:.3f}",
                    f"{speed / base:.2f}x",
                ]
            )
    header = [model, "samples/sec", "ms per step", unit, "host launches", "peak MB", "final loss", "speed-up"]
    return markdown_table(header, lines) if lines else ""


def grid_table(directory: Path) -> str:
    """V2 over V1 at all batch sizes and lengths."""
    lines = []
    for model in MODELS:
        for precision in ("fp32", "bf16"):
            rows = [row for row in read_rows(directory / f"grid_{model}.json") if row["precision"] == precision]
            both = [(r["v1"], r["v2"]) for r in rows if r["v1"]["status"] == r["v2"]["status"] == "ok"]
            if not both:
                continue
            speed = sorted(v1["batch_ms"] / v2["batch_ms"] for v1, v2 in both)
            peak = sorted(v2["peak_mb"] / v1["peak_mb"] for v1, v2 in both)
            ends = [f"{speed[0]:.2f}x", f"{speed[-1]:.2f}x", f"{peak[0]:.2f} to {peak[-1]:.2f}"]
            lines.append([f"{model} {precision}", str(len(both)), *ends])
    header = ["V2 over V1, eager", "shapes", "slowest", "fastest", "peak memory, smallest to largest ratio"]
    return markdown_table(header, lines) if lines else ""


def ablation_table(directory: Path, model: str) -> str:
    """What each fusion of a model gains alone, and what all of them gain without it."""
    rows = read_rows(directory / f"ablation_{model}.json")
    if not rows:
        return ""
    columns = {"per_step": (rows[0]["unit"], "{}"), "kernel_ms": ("kernel ms", "{:.2f}")}
    columns |= {"batch_ms": ("ms per step", "{:.2f}"), "speedup": ("speed-up", "{:.2f}x")}
    columns = {key: column for key, column in columns.items() if key in rows[0]}  # no kernels on a CPU
    lines = {row["fusions"]: [row["fusions"]] for row in rows}
    for row in rows:  # all of the first precision, then all of the next
        lines[row["fusions"]] += (form.format(row[key]) for key, (_, form) in columns.items())
    precisions = dict.fromkeys(row["precision"] for row in rows)
    header = [f"{precision} {label}" for precision in precisions for label, _ in columns.values()]
    return markdown_table([f"{model}_v2", *header], [*lines.values()])


def memory_table(directory: Path) -> str:
    """Peak memory of TinyLlama V2 at each length."""
    rows = read_rows(directory / "memory.json")
    if not rows:
        return ""
    lines = []
    for name, label in (("scores", "materialised scores, MB"), ("flash", "flash attention, MB")):
        runs = (row[name] for row in rows)
        lines.append([label, *(NOT_FINISHED.get(run["status"]) or cell(run["peak_mb"], ".0f") for run in runs)])
    return markdown_table(["sequence length", *(str(row["seq_len"]) for row in rows)], lines)


def table(directory: Path) -> str:
    """The README's tables of one device as Markdown: those whose result files lie in the directory."""
    tables = [headline_table(directory, model) for model in MODELS]
    tables += [ablation_table(directory, model) for model in MODELS]
    tables += [make(directory) for make in (grid_table, share_table, memory_table, scaling_table, ddp_table)]
    if not any(tables):
        raise ToolError(f"{directory}: no result files of these measurements")
    return "\n\n".join(filter(None, tables))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    suites = ("headline", "grid", "ablation", "memory", "overhead", "scaling", "ddp", "table")
    add = parser.add_argument
    add("suite", choices=suites)
    add("directory", type=Path)
    add("--rounds", type=at_least(1), default=3, metavar="N", help="of all but memory and overhead (default: 3)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of headline, grid, ablation")
    add("--versions", nargs="+", choices=("v1", "v2"), default=["v1", "v2"], help="of headline")
    add("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), help="likewise")
    return parser


def run_suite(args: argparse.Namespace) -> int:
    """Measure, or print the tables; returns the exit status."""
    if args.suite == "table":
        try:
            print(table(args.directory))
        except (KeyError, TypeError, AttributeError) as error:
            raise ToolError(f"{args.directory}: a file there is none of these measurements ({error!r})") from error
        return 0
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.suite == "headline":
        return int(headline(args.directory, args.rounds, args.models, args.versions, args.configurations) > 0)
    if args.suite == "grid":
        for model in args.models:
            write_rows(args.directory / f"grid_{model}.json", grid(model, args.rounds))
    elif args.suite == "ablation":
        for model in args.models:
            write_rows(args.directory / f"ablation_{model}.json", ablation(model, args.rounds), rounds=args.rounds)
    elif args.suite == "memory":
        write_rows(args.directory / "memory.json", memory(), batch_size=4)
    elif args.suite == "overhead":
        write_rows(args.directory / "overhead.json", overhead())
    else:
        processes = join_processes(args.suite)
        rows = {"scaling": scaling, "ddp": ddp}[args.suite](processes, args.rounds)
        write_rows(args.directory / f"{args.suite}_{processes}.json", rows, processes=processes)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    return run_tool(PROG, lambda: run_suite(args))


if __name__ == "__main__":
    sys.exit(main())
