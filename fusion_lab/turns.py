"""Runs of version scripts, and calls of any functions, measured in short alternating turns in one
process.

In a notebook, for two ways to do the same:

    from fusion_lab.turns import compare_in_turns

    print(compare_in_turns({"before": lambda: plain(x), "after": lambda: mine(x)}))
"""

import argparse
import contextlib
import math
import statistics
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import NoReturn, Protocol, TypeVar

from fusion_lab.cli import ToolError
from fusion_lab.host import free_memory, is_out_of_memory, seconds
from fusion_lab.script import named_run, script_named

T = TypeVar("T")
GRAPH = "--enable-cuda-graph"
TURN_MS = 300  # about how long a turn is
WIDE = 1.25  # the highest ratio over the lowest: beyond this the turns do not agree on the size
# the last two have own graphs
DECIDED = {GRAPH, "--disable-cuda-graph", "reduce-overhead", "max-autotune"}


def make_trainer(module: ModuleType, argv: Sequence[str]):
    """The Trainer of a script for this command line, not trained yet."""
    args = parse_quiet(module, argv)
    return module.Trainer(args).build()


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


def named(script: str, argv: Sequence[str], args: argparse.Namespace) -> dict:
    """What a run of a script is, as rows of studies name it; `args` are its arguments as parsed."""
    given, module = vars(args), script_named(script)
    fusions = [flag for flag, attribute, _ in module.FUSIONS if given[attribute]]
    sizes = {"batch_size": args.batch_size, "seq_len": args.seq_len}
    return {**named_run(script, given), **sizes, "fusions": fusions, "argv": argv}


def short_run(script: str, argv: Sequence[str]) -> dict:
    """Train a few steps here, without counting and profiling; the result is ok or out of memory."""
    module = script_named(script)
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--under-profiler", "--log-interval", "1000000", "--profile-dir", folder]
        result = module.train(module.parse_args([*argv, *quiet]))
    free_memory()
    if result["exit_status"] == 130:
        raise KeyboardInterrupt
    if result["status"] == "failed":
        raise ToolError(f"{script} {' '.join(argv)}: {result['error']}", status=1)
    return result


def parse_quiet(module: ModuleType, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a run that shows no progress and leaves nothing behind."""
    quiet = ["--log-interval", "1000000", "--profile-dir", tempfile.gettempdir()]
    return module.parse_args([*argv, *quiet])


def begin(module: ModuleType, args: argparse.Namespace) -> tuple[object, int, float | None]:
    """A warm Trainer of a script, how many of its steps are a turn, and its peak memory in MB as
    that of a run alone."""
    trainer = module.Trainer(args)
    trainer.start()
    shared = args.torch_compile_mode in module.OWN_GRAPHS  # of which all use one pool of memory
    peak = None if shared or not trainer.gpu else trainer.peak / 1e6
    return trainer, max(2, math.ceil(TURN_MS / trainer.take(3))), peak


def alternating(sides: Collection[T], rounds: int) -> Iterator[tuple[int, T]]:
    """The number of the turn and the side whose turn it is: first to last, then back, and so on;
    without one that is no longer among them, because it failed."""
    for turn in range(rounds):
        for side in [*sides][:: 1 if turn % 2 == 0 else -1]:
            if side in sides:
                yield turn, side


def failure(error: Exception) -> dict[str, str]:
    """What a row says of a side that did not finish."""
    oom = is_out_of_memory(error)
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return {"status": "oom" if oom else "failed", "error": reason}


class Side(Protocol):
    """A side that is ready to take turns."""

    def take(self) -> float:
        """Take a turn; return what it took in milliseconds."""

    def finish(self, times: list[float]) -> dict:
        """Make the row of the side from its times."""


def scheduled(
    sides: Mapping[str, Callable[[], Side]],
    rounds: int,
    failed: Callable[[str, Exception], dict] = lambda name, error: failure(error),
) -> dict[str, dict]:
    """Have sides take turns: all are started, each turn has every side in it, all are finished.

    Args:
        sides: what starts each side, by its name.
        failed: makes the row of a side of which this is the error; it then takes no part any more.
    """
    rows = {}
    running = {}
    times = {name: [] for name in sides}

    @contextlib.contextmanager
    def attempt(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            running.pop(name, None)
            rows[name] = failed(name, error)
        if name not in running:
            free_memory()

    for name, start in sides.items():
        with attempt(name):
            running[name] = start()
    for _, name in alternating(running, rounds):
        with attempt(name):
            times[name].append(running[name].take())
    for name in [*running]:
        with attempt(name):
            rows[name] = running[name].finish(times[name])
    running.clear()
    free_memory()
    return {name: rows[name] for name in sides}


class ScriptSide:
    """A script with its arguments that is warm, and takes turns of about 0.3 s or two steps."""

    def __init__(
        self,
        module: ModuleType,
        args: argparse.Namespace,
        counted: bool,
        finishing: Callable[[object], dict],
    ):
        self.module = module
        self.args = args
        self.counted = counted
        self.finishing = finishing
        self.trainer, self.steps, self.peak = begin(module, args)

    def take(self) -> float:
        return self.trainer.take(self.steps)

    def finish(self, times: list[float]) -> dict:
        self.module.prepare(self.args)
        counts = self.module.count_kernels(self.trainer) if self.counted else {}
        if not self.trainer.gpu:
            events = self.module.memory_of_a_step(self.trainer)
            self.peak = max(used for _, used in events) / 1e6
        row = {"peak_mb": self.peak, "batch_ms": statistics.median(times), "turns_ms": times}
        return row | counts | self.finishing(self.trainer)


def in_turns(
    sides: dict[str, tuple[str, list[str]]],
    rounds: int,
    counted: bool = True,
    finishing: Callable[[object], dict] = lambda trainer: {},
) -> dict[str, dict]:
    """What steps of each side (script, arguments) take, in turns of about 0.3 s or two steps.

    Milliseconds per step are the median of the turns, peak memory is that of the side alone,
    kernels are counted after the last turn unless `counted` is False. What `finishing` makes of a
    side's Trainer is in its row, too. One that runs out of memory, or fails, has a `status` and an
    `error` instead.
    """
    modules = {name: script_named(script) for name, (script, _) in sides.items()}
    parsed = {name: parse_quiet(modules[name], argv) for name, (_, argv) in sides.items()}

    def start(name: str) -> ScriptSide:
        return ScriptSide(modules[name], parsed[name], counted, finishing)

    found = scheduled({name: partial(start, name) for name in sides}, rounds)
    return {name: named(*sides[name], parsed[name]) | row for name, row in found.items()}


def speed(row: Mapping) -> float | None:
    """Samples per second of a row in its median turn, None without turns."""
    turns = row.get("turns_ms")
    return 1e3 * row["batch_size"] / statistics.median(turns) if turns else None


def ratios(first: Mapping, second: Mapping) -> list[float]:
    """Time of the first side over that of the second, turn by turn; none where one took none."""
    for key in ("turns_ms", "turns_us"):
        if first.get(key) and second.get(key):
            return [a / b for a, b in zip(first[key], second[key], strict=True)]
    return []


def speedup(first: Mapping | None, second: Mapping | None) -> float | None:
    """How many times as fast the second side is: the median over the turns, None without any."""
    found = ratios(first or {}, second or {})
    return statistics.median(found) if found else None


def verdict(ratios: Sequence[float]) -> str:
    """What ratios turn by turn show, in the words of --compare-fusion.

    Three or four turns tell which side is faster where their range lies so far from 1 that it would
    fit three times in between.
    """
    low, high = (round(limit, 2) for limit in (min(ratios), max(ratios)))  # as they are printed
    far = low > 0 and max(low, 1 / high) > (high / low) ** 3
    if len(ratios) < (3 if far else 5):
        return "too few turns to tell"
    if low <= 1 <= high:
        return "no difference seen"
    return "all turns agree" if high <= WIDE * low else "all turns agree on which is faster"


def spread(ratios: Sequence[float]) -> str:
    """The range of ratios turn by turn, and what they show if they do not simply agree."""
    said = verdict(ratios)
    doubt = "" if said == "all turns agree" else f", {said}"
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x{doubt}"


# --- any functions


@dataclass(frozen=True, repr=False)
class Turns:
    """Milliseconds of a call of each side, turn by turn. Printed, their medians, and the speed-up
    of each over the first with its range and a verdict."""

    ms: dict[str, list[float]]

    @property
    def us(self) -> dict[str, list[float]]:
        return {side: [1e3 * ms for ms in times] for side, times in self.ms.items()}

    def ratios(self, side: str) -> list[float]:
        """Time of the first side over that of this one, turn by turn."""
        first = next(iter(self.ms.values()))
        return ratios({"turns_ms": first}, {"turns_ms": self.ms[side]})

    def __repr__(self) -> str:
        first, *others = self.ms
        lines = [f"{side}: {statistics.median(ms):.4g} ms" for side, ms in self.ms.items()]
        for side in others:
            ratios = self.ratios(side)
            low, high = min(ratios), max(ratios)
            lines.append(
                f"{side} is {statistics.median(ratios):.2f}x as fast as {first}: {low:.2f}x to "
                f"{high:.2f}x in {len(ratios)} turns, {100 * (high / low - 1):.0f} % wide "
                f"({verdict(ratios)})"
            )
        return "\n".join(lines)


def warm_up(step: Callable[[], object]) -> None:
    """Some calls as a capture wants them before it. RuntimeError if one waits for the device, which
    spoils a capture, but for a step marked `unchecked`, which does so outside graphs only."""
    import torch

    if not torch.cuda.is_available():
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # is a prototype
        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("default" if getattr(step, "unchecked", False) else "error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)


def captured(step: Callable[[], object], repeats: int, pool: object = None) -> Callable[[], None]:
    """So many calls as one graph with memory of this pool; as they are on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return lambda: [step() for _ in range(repeats)] and None
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        # a failed capture would leave its own
        outer = torch.cuda.stream(torch.cuda.current_stream())
        with outer, torch.cuda.graph(graph, pool=pool, stream=stream):
            for _ in range(repeats):
                step()
    except Exception:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())  # the old one waits for the capture
        raise
    return graph.replay


class GraphSide:
    """Calls of a function that was called before, as one graph of about so many milliseconds with
    memory of this pool; as they are on a CPU."""

    def __init__(self, function: Callable[[], object], ms: float, pool: object, most: int = 1000):
        import torch

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        calls = round(ms / 1e3 / seconds(function, self.device))
        self.calls = max(1, min(most, calls))
        warm_up(function)
        self.graph = captured(function, self.calls, pool)

    def take(self) -> float:
        return 1e3 * seconds(self.graph, self.device) / self.calls

    def finish(self, times: list[float]) -> dict:
        return {"turns_ms": times[1:]}  # the first one warms up


def compare_in_turns(
    sides: Mapping[str, Callable[[], object]], turns: int = 11, ms: float = 50.0
) -> Turns:
    """Call these functions in short alternating turns.

    On a GPU the calls of a turn are one CUDA graph, so the host does not count: a function must not
    wait for the device (`.item()`, `.cpu()`), and an optimizer in it must be `capturable`. The
    graphs share their memory.

    Args:
        sides: functions without arguments by name; the first is what the others are compared with.
        turns: how often each side has its turn, after one that is not counted.
        ms: about how many milliseconds a turn of a side takes, at least one call.

    Raises:
        ToolError: a function cannot be captured as a graph.
    """
    import torch

    gpu = torch.cuda.is_available()
    pool = torch.cuda.graph_pool_handle() if gpu else None

    def start(name: str) -> GraphSide:
        sides[name]()  # compiles, and fills caches
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*Graph is empty")  # on the host
                return GraphSide(sides[name], ms, pool)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, UserWarning) as error:
            reason = str(error).partition("\n")[0]
            message = f"{name} cannot be captured as a graph: {reason}"
            raise ToolError(message, status=1) from error

    def failed(_: str, error: Exception) -> NoReturn:
        raise error

    rows = scheduled({name: partial(start, name) for name in sides}, turns + 1, failed)
    return Turns({side: row["turns_ms"] for side, row in rows.items()})
