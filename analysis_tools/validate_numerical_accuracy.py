#!/usr/bin/env python3
"""Does one version compute what another one computes? Across scripts, as --verify-accuracy is
within one.

Both scripts get the same arguments, the weights of the baseline and its batches. Compared are
outputs, loss and the gradient of every parameter, first at the initial weights, then at those that
the baseline has after --steps training steps; and the losses of these steps, which each script
takes with its own optimizer and, where its arguments ask for one, as a graph. Names are those of
state_dict(), where nothing is fused.

An error is the norm of the difference from float64 over the norm of the value, each gradient by
itself. Its limit is three times the error of the baseline with everything unfused in the same
precision, the largest of nine roundings where one does not explain an error, or --tolerance where
that is more; --tolerance is also the limit of the two loss curves' relative difference. Unless
given it is 1e-3 for losses and outputs, and for gradients, as an argument of a ReLU may round to
the other side of zero, 3e-3, or 0.05 below float32. A parameter without a gradient is named and
fails the check. Exit status 1 where something is off.

Examples:
  python analysis_tools/validate_numerical_accuracy.py --baseline tiny_llama_v1.py \\
      --optimized tiny_llama_v2.py
  python analysis_tools/validate_numerical_accuracy.py --baseline tiny_llama_v1.py \\
      --optimized tiny_llama_v4.py \\
      --tolerance 1e-3 --hidden-dim 64 --num-layers 2 --seq-len 32 --batch-size 2
  python analysis_tools/validate_numerical_accuracy.py --baseline tiny_openfold_v1.py \\
      --optimized tiny_openfold_v2.py --steps 10 --use-amp --tolerance 0.01
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from lab.cli import Parser, ToolError, documented_parser, positive, program
from lab.script import load_script, script_arguments
from lab.show import Column, render
from lab.turns import free_memory

PROG = Path(__file__).name
EAGER_STEPS = 2  # before a step is captured as a graph
CURVE = 1e-3  # relative difference of losses
MISSING = "without a gradient"
COLUMNS = [
    Column("what", "what"),
    Column("worst", "worst", text=True),
    Column("relative difference", "error"),
    Column("limit", "limit"),
    Column("verdict", lambda row: "pass" if row["passed"] else "FAIL"),
]


@dataclass(frozen=True)
class Side:
    """A script with its arguments, and what the other one has to share with it."""

    name: str
    module: ModuleType
    args: argparse.Namespace

    def trainer(self, weights: dict, first: Side):
        """A new Trainer with these weights; its batches are those of the first side."""
        import torch

        free_memory()
        trainer = self.module.Trainer(self.args, self.module.prepare(self.args))
        trainer.model.load_state_dict(weights)
        host, seed = torch.device("cpu"), first.args.seed
        trainer.batches = first.module.make_batches(first.args, host, seed)
        return trainer


def build_parser() -> Parser:
    """The command line."""
    usage = "%(prog)s --baseline FILE --optimized FILE [arguments] [arguments of both scripts]"
    note = "Every other argument goes to both scripts.\n\n"
    parser = documented_parser(PROG, __doc__, usage, note)
    parser.add_path("--baseline", "FILE", "version script whose values are expected", required=True)
    parser.add_path("--optimized", "FILE", "version script that is checked", required=True)
    limit = "limit, looser or tighter (default: 1e-3, for gradients 3e-3, below float32 0.05)"
    parser.add_argument("--tolerance", type=positive(), metavar="X", help=limit)
    parser.add_count("--steps", 20, "of the loss curve")
    return parser


def load_sides(args: argparse.Namespace, argv: Sequence[str]) -> list[Side]:
    """Both scripts, and ToolError if they are not versions of one model."""
    import torch

    sides = []
    for path in (args.baseline, args.optimized):
        module = load_script(str(path))
        sides.append(Side(path.name, module, script_arguments(module, argv, None)[1]))
    models = [side.module.build_model(side.args, torch.device("meta")) for side in sides]
    states = [model.state_dict().items() for model in models]
    shapes = [{name: tuple(value.shape) for name, value in state} for state in states]
    if odd := sorted(dict(shapes[0].items() ^ shapes[1].items())):
        both = " and ".join(side.name for side in sides)
        raise ToolError(f"{both} are different models: not both have {odd[0]}, of the same shape")
    return sides


def line(what: str, judged: dict[str, tuple[float, float]]) -> dict:
    """A row with the worst of these relative errors and its limit, by its place. A NaN fails."""
    from lab.accuracy import worst_of

    error, limit = judged[worst := worst_of(judged)]
    shown = {"error": f"{error:.2e}", "limit": f"{limit:.2e}", "passed": error <= limit}
    return {"what": what, "worst": worst, **shown}


def compare_values(
    sides: Sequence[Side], weights: dict, when: str, tolerance: float | None
) -> list[dict]:
    """Rows for outputs, loss and gradients at these weights, judged as by --verify-accuracy."""
    from lab.accuracy import GRADIENT, judged_values, values_of

    first = sides[0]

    def make_trainer(args: argparse.Namespace):
        return replace(first, args=args).trainer(weights, first)

    print(f"comparing outputs and gradients {when} with float64", file=sys.stderr)
    values = [values_of(side.module, side.trainer(weights, first)) for side in sides]
    judged = judged_values(first.module, first.args, make_trainer, values[1], tolerance)
    free_memory()
    gradients = {name: judged.pop(name) for name in list(judged) if name.startswith(GRADIENT)}
    loss = {"loss": judged.pop("loss")}
    what = {"outputs": judged, "loss": loss, f"{len(gradients)} gradients": gradients}
    lines = [line(f"{kind} {when}", found) for kind, found in what.items()]
    for side, found in zip(sides, values, strict=True):
        names = [n.removeprefix(GRADIENT) for n, value in found.items() if value.isnan().all()]
        if names:
            shown = {"error": str(len(names)), "limit": "0", "passed": False}
            what = f"{MISSING} in {side.name} {when}"
            lines.append({"what": what, "worst": ", ".join(names), **shown})
    return lines


def compare(sides: Sequence[Side], tolerance: float | None, steps: int) -> list[dict]:
    """The rows of the table."""
    first, curves, trained = sides[0], [], {}
    weights = first.module.build_model(first.args, first.module.prepare(first.args)).state_dict()
    lines = compare_values(sides, weights, "at first", tolerance)
    if any(line["what"].startswith(MISSING) for line in lines):
        return lines  # an optimizer may refuse to go on
    for side in sides:
        trainer, losses = side.trainer(weights, first), []
        print(f"{side.name}: {steps} training steps", file=sys.stderr)
        for step in range(steps):
            if trainer.args.cuda_graph and step == EAGER_STEPS:
                trainer.capture()
            losses.append(float(trainer.step()))
        curves.append(losses)
        state = trainer.model.state_dict().items()
        trained = trained or {name: value.clone() for name, value in state}
        del trainer, state
        free_memory()
    lines += compare_values(sides, trained, f"after {steps} steps", tolerance)
    pairs = enumerate(zip(*curves, strict=True), start=1)
    errors = {n: abs(loss - expected) / abs(expected) for n, (expected, loss) in pairs}
    curve = {f"step {n}": (error, tolerance or CURVE) for n, error in errors.items()}
    return [*lines, line(f"losses of {steps} steps", curve)]


def validate(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the table; returns the exit status."""
    sides = load_sides(args, argv)
    try:
        lines = compare(sides, args.tolerance, args.steps)
    except (RuntimeError, MemoryError) as error:
        status, message = sides[0].module.explain(error, Path())
        raise ToolError(message, status) from error
    print(render(COLUMNS, lines))
    passed = all(line["passed"] for line in lines)
    print(f"\n{sides[1].name} against {sides[0].name}: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


main = program(build_parser, validate, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())
