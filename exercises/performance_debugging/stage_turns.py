#!/usr/bin/env python3
"""Time all stages in turns: each is a process that trains on when it is its turn, and the stopwatch
is outside of it.

What a stage says of its own step is kept beside it. The arguments are those of tiny_llama_v3.py;
compare_stages.py reads DIR/turns.json, which this writes.

Example:
  python exercises/performance_debugging/stage_turns.py --result-dir DIR --seq-len 128 --use-amp
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from exercises.performance_debugging import check_step
from fusion_lab.cli import ToolError, documented_parser, run_tool
from fusion_lab.files import write_text
from fusion_lab.turns import begin, parse_quiet, scheduled

PROG = Path(__file__).name
HERE = Path(__file__).resolve().parent
FINAL = HERE.parents[1] / "tiny_llama_v3.py"
ROUNDS = 6  # the first warms up
STAGES = {path.name[3:9]: path for path in sorted(HERE.glob("v3_stage*.py"))} | {"stage5": FINAL}


def train(path: Path, argv: Sequence[str], pipe: Connection) -> None:
    """In a process of its own: build a stage, send how many steps a turn has, then for each thing
    that comes take a turn, and send what the stage says a step took, in milliseconds."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            module = check_step.load(path)
            trainer, steps, _ = begin(module, parse_quiet(module, argv))
            pipe.send(steps)
            while pipe.recv():
                pipe.send(trainer.take(steps))
        except Exception as error:
            pipe.send(f"{path.name}: {type(error).__name__}: {error}".partition("\n")[0])


class Stage:
    """Such a process, and the stopwatch outside of it."""

    def __init__(self, path: Path, argv: Sequence[str]):
        self.pipe, inside = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=train, args=(path, argv, inside), daemon=True)
        self.process.start()
        inside.close()
        self.steps, self.claimed = self.answer(), []

    def answer(self) -> float:
        """The next thing that the process sends; ToolError if that is an error."""
        try:
            answer = self.pipe.recv()
        except EOFError as error:
            raise ToolError(f"process {self.process.pid} died", status=1) from error
        if isinstance(answer, str):
            raise ToolError(answer, status=1)
        return answer

    def take(self) -> float:
        """Milliseconds of a step by the stopwatch."""
        before = time.perf_counter()
        self.pipe.send(True)
        self.claimed.append(self.answer())
        return 1e3 * (time.perf_counter() - before) / self.steps

    def finish(self, times: Sequence[float]) -> dict:
        """The row of this stage."""
        self.pipe.send(False)
        self.process.join()
        return {"turns_ms": times[1:], "claimed_ms": statistics.median(self.claimed[1:])}


def measured(paths: dict[str, Path], argv: Sequence[str], rounds: int = ROUNDS) -> list[dict]:
    """A row for each stage that ran: its name, the milliseconds of a step in each turn, and what it
    said itself."""

    def failed(name: str, error: Exception) -> dict:
        print(f"{PROG}: {name}: {error}", file=sys.stderr)
        return {}

    starts = {name: partial(Stage, path, argv) for name, path in paths.items()}
    rows = scheduled(starts, rounds, failed)
    return [{"stage": name, **row} for name, row in rows.items() if row]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = documented_parser(PROG, __doc__, usage="%(prog)s --result-dir DIR [arguments of V3]")
    parser.add_argument("--result-dir", type=Path, required=True, metavar="DIR")
    args, rest = parser.parse_known_args(argv)

    def body() -> int:
        rows = measured(STAGES, rest)
        write_text(args.result_dir / "turns.json", json.dumps({"rows": rows}, indent=1) + "\n")
        return int(len(rows) < len(STAGES))

    return run_tool(PROG, body)


if __name__ == "__main__":
    sys.exit(main())
