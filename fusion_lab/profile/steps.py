"""Steps of a version script under a profiler, in ranges of their phases and modules. `trainer` is
the Trainer of the script throughout."""

import contextlib
import ctypes
import gzip
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from fusion_lab.cli import ToolError, note, sign_of_life
from fusion_lab.files import write_file
from fusion_lab.profile.kernels import GRAPH_PHASES, PHASES


@contextlib.contextmanager
def ranges(trainer, named: Callable[[str], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Run the steps inside with a range around each phase and module, made by `named`."""
    phases = GRAPH_PHASES if trainer.graph else PHASES
    following = dict(itertools.pairwise(phases))
    modules = [] if trainer.args.torch_compile else [*trainer.model.named_modules()][1:]
    mark, opened = trainer.mark, contextlib.ExitStack()

    def mark_and_open(phase: str) -> None:
        mark(phase)
        opened.close()
        if phase in following:
            opened.enter_context(named(following[phase]))

    for name, module in modules:
        module.forward = named(name)(module.forward)  # a context manager is a decorator, too
    trainer.mark, trainer.next_batch = mark_and_open, named(phases[0])(trainer.next_batch)
    try:
        yield
    finally:
        opened.close()
        del trainer.mark, trainer.next_batch  # those of its class again
        for _, module in modules:
            del module.forward


@contextlib.contextmanager
def recorded_region(trainers: Sequence) -> Iterator[None]:
    """Have a GPU's profiler record what these run inside, in ranges (cudaProfilerStart, ROCTx)."""
    with contextlib.ExitStack() as at_end:
        if not trainers[0].gpu:
            note("--enable-rocm-profiling: no GPU here, so nothing is marked")
            trainers = ()
        else:
            at_end.enter_context(torch.cuda.profiler.profile())
        if trainers and torch.version.hip:
            try:
                roctx = ctypes.CDLL("librocprofiler-sdk-roctx.so")
            except OSError as error:
                needed = "needs ROCm's librocprofiler-sdk-roctx.so"
                raise ImportError(f"--enable-rocm-profiling {needed}") from error
            roctx.roctxProfilerResume(0)
            at_end.callback(roctx.roctxProfilerPause, 0)
        for trainer in trainers:
            at_end.enter_context(ranges(trainer, torch.cuda.nvtx.range))
        yield


@contextlib.contextmanager
def profiled_region(script: ModuleType, trainers: Sequence) -> Iterator[None]:
    """Run the measured steps of these inside; a profiler records them, and profiles are written
    behind them, as the flags of the last one ask for it."""
    args = trainers[-1].args
    asked = args.enable_pytorch_profiler or args.enable_memory_profiling
    if asked and args.under_profiler and not script.RANK:
        note("PyTorch's profiles are not written: another profiler is at work")
    with recorded_region(trainers) if args.enable_rocm_profiling else contextlib.nullcontext():
        yield
    for trainer in trainers if not args.under_profiler else ():
        with sign_of_life("writing the profile") if not script.RANK else contextlib.nullcontext():
            write_profile(script, trainer)


def profiled_steps(
    trainer, steps: int = 1, **options: bool
) -> tuple[torch.profiler.profile, list[dict]]:
    """Take steps under the PyTorch profiler; return it, and the events of its trace."""
    profile = torch.profiler.profile(acc_events=True, **options)
    with profile, ranges(trainer, torch.profiler.record_function):
        if dist.is_initialized():  # wait for the others' profilers, without a kernel
            dist.all_reduce(torch.zeros(1))
        for _ in range(steps):
            trainer.step()
        if trainer.gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:  # the path stands in the file, not escaped
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return profile, json.loads(path.read_text())["traceEvents"]


def write_whole(path: str, content: str | bytes) -> None:
    """Write a file, whole or not at all. OSError where it cannot be written, as of a script."""
    content = content.encode() if isinstance(content, str) else content
    try:
        write_file(Path(path), lambda temporary: temporary.write_bytes(content))
    except ToolError as error:
        raise error.__cause__ or error from None


def write_profile(script: ModuleType, trainer) -> None:
    """Write what the flags of a run ask for: tables of operators by time and a trace of three
    steps; the course of memory in one step. All processes take these; the first one writes."""
    start = trainer.args.profile_dir / script.SCRIPT
    if trainer.args.enable_memory_profiling:
        course = script.memory_of_a_step(trainer)
        rows = ["time_us,bytes\n", *(f"{time:.3f},{used:.0f}\n" for time, used in course)]
        if not script.RANK:
            write_whole(f"{start}_memory_timeline.csv", "".join(rows))
    if not trainer.args.enable_pytorch_profiler:
        return
    profile, events = profiled_steps(trainer, steps=3, record_shapes=True)
    if script.RANK:
        return
    for clock in ("cpu", "device") if trainer.gpu else ("cpu",):
        table = profile.key_averages().table(f"self_{clock}_time_total", row_limit=40)
        table = table.replace("time total", "total")
        write_whole(f"{start}_operators_by_{clock}_time.txt", table)
    trace = json.dumps({"traceEvents": events}).encode()
    write_whole(f"{start}_trace.json.gz", gzip.compress(trace))
