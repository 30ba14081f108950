"""Runs of version scripts measured in short alternating turns in one process, and studies made of such rows."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from types import ModuleType

from profiling.program import ToolError, interpret_without_gpu, write_text
from profiling.provenance import provenance, watched
from profiling.records import Row, Study, checked, read

GRAPH = "--enable-cuda-graph"
TURN_MS = 300  # about how long a turn is
DECIDED = {GRAPH, "--disable-cuda-graph", "reduce-overhead", "max-autotune"}  # the last two have own graphs
Part = tuple[dict, Callable[[], dict | list[dict]]]  # what names a row, and what measures the rest of it, or of several


def free_memory() -> None:
    """Let go of what the runs before held on the device, graphs of torch.compile included."""
    import torch

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # some lie in the memory of graphs that are gone, which they would keep
        torch.cuda.empty_cache()


def make_trainer(module: ModuleType, argv: Sequence[str]):
    """The Trainer of a script for this command line, not trained yet."""
    args = module.parse_args([*argv, "--profile-dir", tempfile.gettempdir()])
    return module.Trainer(args, module.prepare(args))


def words_of(argv: Sequence[str]) -> set[str]:
    """Arguments and their values, also those in --name=value."""
    return set(" ".join(argv).replace("=", " ").split())


def on_gpu(argv: Sequence[str]) -> bool:
    """Does a script with these arguments run on a GPU?"""
    import torch

    return torch.cuda.is_available() and "cpu" not in words_of(argv)


def graph_of(argv: Sequence[str]) -> list[str]:
    """The same as a whole-step graph where there is a GPU, unless these arguments decide it."""
    return [*argv, GRAPH] if on_gpu(argv) and not DECIDED & words_of(argv) else [*argv]


def precision_of(training: Mapping) -> str:
    """The type of the matrix products as studies name it, from the arguments of a script or its result's `training`."""
    if training.get("use_amp"):
        return {"float16": "fp16"}.get(training.get("amp_dtype"), "bf16")
    return {"highest": "fp32", "high": "TF32"}.get(training.get("matmul_precision") or "highest", "medium fp32")


def short_run(script: str, argv: Sequence[str]) -> dict:
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


def parse_quiet(module: ModuleType, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a run that shows no progress and leaves nothing behind."""
    return module.parse_args([*argv, "--log-interval", "1000000", "--profile-dir", tempfile.gettempdir()])


def begin(module: ModuleType, args: argparse.Namespace, rounds: int) -> tuple[object, int, float | None]:
    """A warm Run of a script, how many of its steps are a turn, and its peak memory in MB as that of a run alone."""
    run = module.Run(args)
    gpu = run.device.type == "cuda"
    if gpu:
        module.torch._C._cuda_clearCublasWorkspaces()  # each side has workspaces of its own
    run.start()
    run.plan(3, "trial step")
    trial = run.take(3)
    shared = args.torch_compile_mode in module.OWN_GRAPHS  # of which all use one pool of memory
    peak = None if shared or not gpu else trial.peak / 1e6
    steps = max(2, math.ceil(TURN_MS / trial.step_ms))
    run.plan(rounds * steps, "step")
    return run, steps, peak


def in_turns(sides: dict[str, tuple[str, list[str]]], rounds: int) -> dict[str, dict]:
    """What steps of each side (script, arguments) take, in turns of about 0.3 s and at least two steps.

    The sides change their order from turn to turn. Milliseconds per step are the median of the turns, peak memory is
    that of the side alone, kernels are counted after the last turn. A side that runs out of memory, or fails, has a
    `status` and an `error` in place of these.
    """
    modules = {name: importlib.import_module(script) for name, (script, _) in sides.items()}
    parsed = {name: parse_quiet(modules[name], argv) for name, (_, argv) in sides.items()}
    rows = {name: {"script": script, "argv": argv} for name, (script, argv) in sides.items()}
    runs, steps, times = {}, {}, {name: [] for name in sides}

    def attempt(name: str, work: Callable[[], None]) -> None:
        """Do this for a side; from its first error on it has no run, and the error is in its row."""
        try:
            work()
        except Exception as error:
            runs.pop(name, None)
            status = "oom" if modules[name].is_out_of_memory(error) else "failed"
            rows[name] |= {"status": status, "error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        if name not in runs:
            free_memory()

    def start(name: str) -> None:
        runs[name], steps[name], rows[name]["peak_mb"] = begin(modules[name], parsed[name], rounds)

    def take(name: str) -> None:
        times[name].append(runs[name].take(steps[name]).step_ms)

    def finish(name: str) -> None:
        trainer = runs[name].trainer
        modules[name].prepare(parsed[name])
        counts = modules[name].count_kernels(trainer)
        if not trainer.gpu:
            rows[name]["peak_mb"] = modules[name].memory_of_a_step(trainer) / 1e6
        rows[name] |= {"batch_ms": statistics.median(times[name]), "turns_ms": times[name]}
        rows[name] |= {key: value for key, value in counts.items() if key != "remark"}

    for name in sides:
        attempt(name, partial(start, name))
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            attempt(name, partial(take, name))
    for name in list(runs):
        attempt(name, partial(finish, name))
    runs.clear()
    free_memory()
    return rows


def all_measured(sides: dict[str, tuple[str, list[str]]], rounds: int) -> dict[str, dict]:
    """The same where every side is needed: ToolError for the first that did not finish."""
    rows = in_turns(sides, rounds)
    for row in rows.values():
        if "error" in row:
            command = " ".join([row["script"], *row["argv"]])
            raise ToolError(f"{command}: {row['error']}", status=3 if row["status"] == "oom" else 1)
    return rows


def check_failed(rows: Iterable[dict]) -> None:
    """ToolError if one of these runs failed; out of memory is a result."""
    if failed := [row for row in rows if row.get("status") == "failed"]:
        command = " ".join([failed[0]["script"], *failed[0]["argv"]])
        raise ToolError(f"{len(failed)} of the runs failed, first {command}: {failed[0]['error']}", status=1)


def ratios(first: dict, second: dict) -> list[float]:
    """Time of the first side over that of the second, turn by turn."""
    return [a / b for a, b in zip(first["turns_ms"], second["turns_ms"], strict=True)]


def speedup(first: dict, second: dict) -> float:
    """How many times as fast the second side is: the median over the turns."""
    return statistics.median(ratios(first, second))


def spread(ratios: Sequence[float]) -> str:
    """The range of ratios turn by turn, and whether they show a difference, in the words of --compare-fusion."""
    low, high = min(ratios), max(ratios)
    verdict = ", too few turns to tell" if len(ratios) < 5 else ", no difference seen" if low <= 1 <= high else ""
    return f"{low:.2f}x to {high:.2f}x{verdict}"


def measure_study(path: Path, parts: Iterable[Part], keep: bool = False, **settings: object) -> list[dict]:
    """Measure what is not measured yet, and write the rows with what they were measured on; of several processes, one.

    Rows are in NAME.partial.json until the last one is there, so that an earlier result is replaced by a whole one.
    The same command goes on from there after an interruption; with other settings, or on another device, it is refused.
    To `keep` an earlier result is to treat it in the same way: what it has is not measured again. On a GPU each session
    leaves its `provenance`: commit, driver, clocks and power limit as read, and how long the GPU throttled meanwhile.
    """
    import torch

    if path.suffix != ".json":
        raise ToolError(f"{path}: the name of a study must end in .json")
    interpret_without_gpu()
    first = importlib.import_module("tiny_llama_v1")
    device = torch.device("cuda" if on_gpu(settings.get("argv", ())) else "cpu")
    content = {"environment": first.environment(device)}
    content |= json.loads(json.dumps(settings))  # as they are read back
    unfinished, rows, sessions = path.with_suffix(".partial.json"), [], []
    for file in (path, unfinished) if keep else (unfinished,):
        if file.exists():
            earlier = read(Study, file)
            rows, sessions = earlier.pop("rows"), earlier.pop("provenance", [])
            if earlier != content:
                way_out = "name another file, or delete it" if keep else "delete it first"
                raise ToolError(f"{file}: begun with other settings or on another device; {way_out}")

    def write(file: Path) -> None:
        if first.RANK == 0:
            whole = {**content, **({"provenance": sessions} if sessions else {}), "rows": rows}
            write_text(file, json.dumps(whole, indent=1) + "\n", replace=True)

    gpu = device.type == "cuda"
    sessions += [provenance()] if gpu else []
    write(unfinished)  # a place where nothing can be written shows before anything is measured
    seconds = []
    with watched() if gpu else contextlib.nullcontext({}) as meanwhile:
        for number, (names, measure) in enumerate(parts):
            if any(all(row.get(key) == value for key, value in names.items()) for row in rows):
                continue
            if first.RANK == 0:
                whole = len(parts) if isinstance(parts, Sized) else None  # what comes next may follow from the rows
                left = f"; {statistics.fmean(seconds) * (whole - number):.0f} s left" if whole and seconds else ""
                print(f"{number + 1}{f' of {whole}' if whole else ''}: {in_words(names)}{left}", file=sys.stderr)
            started = time.monotonic()
            found = measure()
            seconds.append(time.monotonic() - started)
            rows += [names | row for row in (found if isinstance(found, list) else [found])]
            write(unfinished)
    if gpu:
        sessions[-1] |= meanwhile
    write(path)
    if first.RANK == 0:
        unfinished.unlink(missing_ok=True)
    return rows


def in_words(names: Mapping[str, object]) -> str:
    """What names a row, for a line of progress."""
    return ", ".join(f"{key} {' '.join(value) if isinstance(value, list) else value}" for key, value in names.items())


def read_rows(path: Path, keys: Iterable[str] = (), measured: Iterable[str] = (), row: type = Row) -> list[dict]:
    """The rows of a study; none if it is not there.

    ToolError names what is wrong with a row: not of this kind, without one of the keys, or neither a status and an
    error nor all that is to be `measured`.
    """
    if not path.exists():
        return []
    rows = read(Study, path)["rows"]
    for number, content in enumerate(rows):
        checked(row, content, path, f"rows[{number}]")
        missing = [key for key in keys if key not in content]
        missing += [key for key in (("error",) if "status" in content else measured) if content.get(key) is None]
        if missing:
            raise ToolError(f"{path}: rows[{number}] has no {missing[0]}: another study, or of an older version")
    return rows


def read_study(path: Path, keys: Iterable[str], measured: Iterable[str] = ("batch_ms", "turns_ms")) -> dict:
    """A study, finished or not, with at least one row; its rows are checked as by `read_rows`."""
    study = read(Study, path)
    if not read_rows(path, keys, measured):
        raise ToolError(f"{path}: a study without a row")
    return study


def heading(study: dict, script: str) -> str:
    """What was measured, on what and how, in a line above the tables of a study."""
    environment, given = study["environment"], " ".join([script, *study.get("argv", [])])
    return (
        f"{given} on {environment.get('device_name')}, PyTorch {environment.get('torch')}, {study.get('rounds')} turns"
    )
