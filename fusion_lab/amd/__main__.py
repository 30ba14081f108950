"""AMD's machine code of Triton kernels, on any machine: what Triton makes for an AMD GPU of the
kernels that a program launches.

  run      execute it on a CPU, and compare each launch with Triton's interpreter
  step     show one wave of a kernel, instruction by instruction
  compile  what each kernel takes: registers, LDS, and how many waves that leaves room for

FILE.py is a program that launches kernels, or a version script, of which it is one training step.
What a command does not know itself are arguments of the program.

Examples:
  amd-run run my_kernels.py
  amd-run step my_kernels.py my_kernel
  amd-run compile tiny_llama_v4.py --use-amp
  amd-run run --help
"""

import importlib
import os
import sys
from collections.abc import Sequence

from fusion_lab.cli import documented_parser, run_tool

COMMANDS = ("run", "step", "compile")


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the command line to one of the three."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = documented_parser("amd-run", __doc__)
    parser.add_argument("command", choices=COMMANDS)
    command = parser.parse_args(argv[:1]).command
    os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton: kernels are compiled
    # without it Triton 3.9 prints a warning
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    name = f"fusion_lab.amd.{command}"
    # a package that is missing is one line
    return run_tool("amd-run", lambda: importlib.import_module(name).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
