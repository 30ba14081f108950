#!/usr/bin/env python3
"""How much of a model does a training script train? Runs anybody's script unchanged, and counts at
each step of its optimizer the tensors that have a gradient.

The script runs as if it were started by itself, without a GPU with Triton's interpreter. Counted is
what the last step has; a script whose steps differ is said to. With --output the row goes to a
study, whose rows are of one file each.

Examples:
  python dev/bench/gradients.py HPCTrainingExamples/MLExamples/TinyTransformer/version3_triton/\\
tiny_llama_v3.py --seq-len 64 --batch-size 1 --num-steps 1
"""

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, note, program
from fusion_lab.files import read_json, write_text
from fusion_lab.host import environment
from fusion_lab.script import interpret_without_gpu


def build_parser() -> Parser:
    parser = documented_parser(
        __file__, __doc__, "%(prog)s [--output FILE.json] SCRIPT [arguments]"
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a training script")
    parser.add_path("--output", "FILE.json", "also keep the numbers there")
    return parser


def counted(script: Path, argv: Sequence[str]) -> dict:
    """Run the script; the tensors and parameters of its optimizer, and those with a gradient."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    steps = []

    def count(optimizer: torch.optim.Optimizer, *unused: object) -> None:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [parameter for parameter in every if parameter.grad is not None]
        sizes = [sum(p.numel() for p in parameters) for parameters in (trained, every)]
        steps.append((len(trained), len(every), *sizes))

    hook = register_optimizer_step_pre_hook(count)
    before = sys.argv
    sys.argv = [str(script), *argv]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
        hook.remove()
    if not steps:
        raise ToolError(f"{script}: no optimizer of PyTorch took a step", status=1)
    if len(set(steps)) > 1:
        note("the steps differ; the last one is counted")
    keys = ("tensors_with_gradient", "tensors", "parameters_with_gradient", "parameters")
    return dict(zip(keys, steps[-1], strict=True)) | {"steps": len(steps)}


def run(args: argparse.Namespace, argv: list[str]) -> int:
    import torch

    interpret_without_gpu()
    row = counted(args.script, argv)
    share = 100 * row["parameters_with_gradient"] / row["parameters"]
    tensors = "{tensors_with_gradient} of {tensors} tensors".format(**row)
    print(f"\nWith a gradient: {tensors}, {share:.1f} % of {row['parameters']:,} parameters")
    if args.output:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        study = {"environment": environment(device), "rows": []}
        if args.output.exists():
            study = read_json(args.output)
        file = "/".join(args.script.parts[-2:])
        study["rows"].append({"file": file, "argv": argv, **row})
        write_text(args.output, json.dumps(study, indent=1) + "\n")
    return 0


main = program(build_parser, run, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())
