#!/usr/bin/env python3
"""Run a version script, or a program around one, with small sizes: what `run_sheet.py --shrink`
puts before each.

One step after at most one of warm-up; sequence lengths 32, 64, 128, 256, ... become 8, 10, 12, 14,
..., batch sizes 2, 4, 8, 16, ... become 2, 4, 6, 8, ..., so that what differs stays different;
sequences and --pair-dim a quarter, heads and --msa-dim a half, layers, blocks and other widths an
eighth, the vocabulary a tenth. torch.compile traces the model but generates no code (backend
aot_eager). Results are those of other models then.

Example:
  python exercises/small_runs.py tiny_llama_v2.py --seq-len 128 --enable-torch-compile
"""

import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence

from fusion_lab.script import DEFAULT_SCRIPT, load_script

Scale = Callable[[int], int]
SCRIPTS = ("tiny_*.py", "run_pytorch_profiler.py", "run_deepspeed_flops.py")


def divided_by(divisor: int) -> Scale:
    return lambda n: max(1, n // divisor)


def in_steps(first: int) -> Scale:
    """Twice as large becomes larger by 2, beginning with `first`, which becomes 2."""
    return lambda n: min(n, 2 * max(1, n.bit_length() - first.bit_length() + 1))


SIZES: dict[str, Scale] = {  # what becomes of each
    **dict.fromkeys(("--num-steps", "--warmup-steps"), lambda n: min(n, 1)),
    **dict.fromkeys(("--hidden-dim", "--intermediate-dim"), divided_by(8)),
    **dict.fromkeys(("--num-layers", "--num-blocks"), divided_by(8)),
    **dict.fromkeys(("--num-heads", "--num-kv-heads", "--msa-dim"), divided_by(2)),
    **dict.fromkeys(("--pair-dim", "--num-seqs"), divided_by(4)),
    "--vocab-size": divided_by(10),
    "--seq-len": in_steps(4),
    "--batch-size": in_steps(2),
}


def shrink(command: Sequence[str]) -> list[str]:
    """The command line with small sizes appended, as the last value of an argument counts; as it is
    where V1, whose arguments and defaults all versions have, cannot read it."""
    model = re.search(r"\btiny_(\w+)_v\d+\.py\b", " ".join([*command, DEFAULT_SCRIPT]))[1]
    if model not in ("llama", "openfold"):
        return list(command)
    parser = load_script(f"tiny_{model}_v1.py").build_parser()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            given = vars(parser.parse_known_args(command)[0])
    except SystemExit:  # of --help, or of a value that the script can refuse
        return list(command)
    given["warmup_steps"] = 5 if given["warmup_steps"] is None else given["warmup_steps"]
    words = list(command)
    for flag, scale in SIZES.items():
        if (value := given.get(flag[2:].replace("-", "_"))) is not None:
            words += [flag, str(scale(value))]
    return words


def main() -> None:
    """Become the script that the command line names."""
    import torch

    compile_with = torch.compile
    # C++ would take minutes
    torch.compile = lambda module, mode: compile_with(module, backend="aot_eager")
    sys.argv = shrink(sys.argv[1:])
    script = os.path.abspath(sys.argv[0])
    sys.path[:2] = [os.path.dirname(script)]  # in place of the repository and this directory
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
