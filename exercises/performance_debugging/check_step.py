#!/usr/bin/env python3
"""One training step of a script, looked at from inside: weights, outputs and gradients of every
parameter.

SCRIPT is a stage of this folder or a version of TinyLlama. Prints for each parameter the standard
deviation of its weights, the root mean square of what its module puts out (a dash where the module
is not called), and the norm of its gradient; then logits, loss, and how many of the parameters have
a gradient that is not zero. The last goes to <profile-dir>/<script>_gradients.json, too. The exit
status is 1 if a parameter has none.

With --train the script trains first, as it does by itself; the exit status is that of the training.

Examples:
  python exercises/performance_debugging/check_step.py tiny_llama_v3.py --seq-len 128
  python exercises/performance_debugging/check_step.py --train tiny_llama_v3.py --seq-len 128 \\
      --num-steps 20
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from fusion_lab.cli import ToolError, documented_parser, run_tool
from fusion_lab.files import write_text
from fusion_lab.script import import_file, load_script
from fusion_lab.show import Column, render

PROG = Path(__file__).name
COLUMNS = [
    Column("parameter", "name"),
    Column("elements", "elements", ","),
    Column("std of weights", "spread", ".4f"),
    Column("rms of output", "output", ".4g"),
    Column("norm of gradient", "gradient", ".3g"),
]


def load(path: Path) -> ModuleType:
    """TinyLlama V3 as a stage changes it when it is imported, or the version of TinyLlama at
    this path."""
    if not path.is_file():
        raise ToolError(f"{path}: no such file")
    if path.name.startswith("tiny_llama_"):
        return load_script(str(path))
    module = import_file(path)
    script = getattr(module, "v3", module)
    if not hasattr(script, "TinyLlama"):
        raise ToolError(f"{path}: neither a stage nor a version of TinyLlama")
    return script


def check(script: ModuleType, args: argparse.Namespace) -> int:
    """Take the step, print what was found, and write how many parameters have a gradient.

    1 if not all have.
    """
    from torch import Tensor

    def rms(tensor: Tensor) -> float:
        return float(tensor.detach().float().square().mean().sqrt())

    trainer = script.Trainer(args).build()
    outputs = {}
    for name, module in trainer.model.named_modules():
        module.register_forward_hook(
            lambda module, inputs, output, name=name: outputs.update({name: output})
        )
    batch = trainer.next_batch()
    with trainer.autocast():
        logits = trainer.model(batch["input_ids"]).detach()
        loss = trainer.model(**batch)
    loss.backward()
    loss = float(loss.detach())

    rows = []
    elements = 0
    with_gradient = 0
    tensors = 0
    for name, parameter in trainer.model.named_parameters():
        output = outputs.get(name.rpartition(".")[0])
        norm = None if parameter.grad is None else float(parameter.grad.norm())
        elements += parameter.numel()
        with_gradient += parameter.numel() * bool(norm)
        tensors += bool(norm)
        spread = float(parameter.detach().std(correction=0))
        size = None if output is None else rms(output[0] if isinstance(output, tuple) else output)
        row = {"name": name, "elements": parameter.numel(), "spread": spread}
        rows.append(row | {"output": size, "gradient": norm})
    percent, vocabulary = 100 * with_gradient / elements, logits.shape[-1]
    print(render(COLUMNS, rows))
    print(f"Logits: rms {rms(logits):.3g}, largest {float(logits.abs().max()):.3g}")
    print(
        f"Loss: {loss:.4f}; equal probabilities give ln {vocabulary} = {math.log(vocabulary):.4f}"
    )
    print(
        f"Parameters with a gradient: {percent:.1f} % of {elements:,} ({tensors} of {len(rows)} "
        "tensors)"
    )
    print(f"Gradient check: {'PASS' if tensors == len(rows) else 'FAIL'}")
    found = {"elements": elements, "elements_with_gradient": with_gradient, "percent": percent}
    write_text(
        args.profile_dir / f"{script.SCRIPT}_gradients.json", json.dumps(found, indent=1) + "\n"
    )
    return int(tensors < len(rows))


def run(argv: Sequence[str] | None) -> int:
    """Train if asked to, then check; returns the exit status."""
    parser = documented_parser(
        PROG, __doc__, usage="%(prog)s [--train] SCRIPT [arguments of the script]"
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("--train", action="store_true", help="train first")
    own, rest = parser.parse_known_args(argv)
    script = load(own.script)
    args = script.parse_args(rest)
    status = script.main(rest) if own.train else 0
    if status:
        return status
    status = check(script, args)
    return 0 if own.train else status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_tool(PROG, lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
