#!/usr/bin/env python3
"""Floating-point operations, memory traffic and a roofline, module by module, of one forward pass
of a version script.

Everything is of the model as the arguments choose it, fusions included, not of the unfused model
that the script's own "FLOPs per step" is counted on. FLOPs are counted by DeepSpeed where that
package is installed (requirements-deepspeed.txt), which counts some element-wise operators too;
otherwise by torch.utils.flop_counter: matrix multiplications and fused attention (causal attention
as if it were full) and nothing else. Modules of repeated blocks are added up: `layers.*.mlp`. What
a block or the model computes outside of the modules listed, such as residuals and the loss, is its
"(rest)".

--computational-intensity adds FLOP per byte. Its model of memory: every operator reads its tensors
from device memory and writes its results there, once each; views cost nothing, and looking up rows
reads these rows only. This is the traffic if nothing stays in a cache between two operators. What
one fused kernel keeps to itself costs nothing, and that is why fusing raises the intensity. A
module may exceed the roof where caches do hold its data.

--generate-roofline measures two ceilings here, a large GEMM in the run's precision and a large
copy, and the time of each module in the forward pass of training steps: on a GPU the sum of its
kernels, on a CPU the time spent in the module, the profiler's own cost included. Only what counts
as FLOP makes a module fast here; one without any is not in the picture.

Written to --profile-dir: <script>_flops.json and .csv with all numbers, <script>_roofline.png, and
with DeepSpeed its own profile, <script>_deepspeed_flops.txt.

Examples:
  python run_deepspeed_flops.py --batch-size 8 --seq-len 64 --computational-intensity \\
      --generate-roofline
  python run_deepspeed_flops.py --script tiny_llama_v2.py --use-amp --generate-roofline \\
      --profile-dir ./roofline
  python run_deepspeed_flops.py --script tiny_llama_v1.py --seq-len 512 --computational-intensity
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from fusion_lab.cli import Parser, ToolError, note, program, say, sign_of_life
from fusion_lab.files import write_text
from fusion_lab.host import is_out_of_memory
from fusion_lab.profile.ceilings import measure_ceilings
from fusion_lab.profile.roofline import (
    count_modules,
    draw,
    module_kinds,
    module_rows,
    module_times,
    without_children,
)
from fusion_lab.script import load_script, measured_with, script_arguments, tool_parser
from fusion_lab.show import Column, render, write_csv

PROG = Path(__file__).name
# they multiply matrices
NOT_SEEN = ("triton-attention", "triton-triangle", "triton-outer-product")


def find_deepspeed() -> ModuleType | None:
    """DeepSpeed's profiler, or None where it is not installed or cannot be used.

    The latter is said on stderr.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            from deepspeed.profiling.flops_profiler import profiler
        return profiler
    except Exception as error:
        # it looks for compilers when imported, and what it raises then is its own
        reason = f"DeepSpeed is installed but cannot be imported ({error})"
        say(f"{reason}; counting without it")
        return None


def count_with_deepspeed(
    profiler: ModuleType, trainer, kinds: dict[str, str], path: Path
) -> Counter:
    """FLOP of one forward pass per kind of module as DeepSpeed counts them.

    Its own profile goes to `path`.
    """
    deepspeed = profiler.FlopsProfiler(trainer.model)
    deepspeed.start_profile()
    try:
        with trainer.autocast():
            trainer.model(**trainer.next_batch())
        deepspeed.print_model_profile(output_file=str(path))
        modules = dict(trainer.model.named_modules())
        inclusive = {name: profiler.get_module_flops(modules[name]) for name in kinds}
    finally:
        deepspeed.end_profile()
    return without_children(inclusive, kinds)


def table(rows: Sequence[dict], intensity: bool, roofline: bool) -> str:
    """The rows as a Markdown table."""
    columns = [
        Column("module", "module"),
        Column("blocks", "blocks"),
        Column("parameters", "parameters", ","),
        Column("GFLOP forward", lambda row: row["flop"] / 1e9, ".4f"),
        Column("share", "share_percent", ".1f", " %"),
    ]
    if intensity:
        columns.append(Column("MB moved", lambda row: row["bytes"] / 1e6, ".2f"))
        columns.append(Column("FLOP/byte", "flop_per_byte", ".2f"))
    if roofline:
        columns.append(Column("ms", "ms", ".3f"))
        columns.append(Column("TFLOP/s", "achieved_tflops", ".3f"))
        columns.append(Column("roof", "roof_tflops", ".3f"))
        columns.append(Column("of roof", "percent_of_roof", ".1f", " %"))
    return render(columns, rows)


def measure(module: ModuleType, args: argparse.Namespace, intensity: bool, roofline: bool) -> int:
    """Count and measure what was asked for, write the files and print the table.

    Returns the exit status.
    """
    device = module.prepare(args)
    directory, device_name = args.profile_dir, module.environment(device)["device_name"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot write there ({error.strerror})"
        raise ToolError(f"--profile-dir {directory}: {reason}") from error
    trainer = module.Trainer(args).build()
    kinds = module_kinds(trainer.model)
    flop, both, moved = count_modules(trainer, kinds, module.NO_WORK)
    source, text = "torch.utils.flop_counter", None
    how = " (DeepSpeed, if wanted: requirements-deepspeed.txt)"
    if (deepspeed := find_deepspeed()) is not None:
        from deepspeed import __version__

        source, how = f"DeepSpeed {__version__}", ""
        text = directory / f"{module.SCRIPT}_deepspeed_flops.txt"
        flop = count_with_deepspeed(deepspeed, trainer, kinds, text)
    spent = module_times(trainer, kinds) if roofline else None
    ceilings = measure_ceilings(args, device) if roofline else None
    rows = module_rows(trainer.model, kinds, flop, moved if intensity else None, spent, ceilings)

    on = [flag for flag, attribute, _ in module.FUSIONS if getattr(args, attribute)]
    if hidden := [f"--disable-{flag}" for flag in on if flag in NOT_SEEN]:
        lost = "what our own kernels multiply is not counted, so FLOP and rates are too low"
        note(f"{lost}; try {' '.join(hidden)}")
    total = sum(flop.values())
    result = {
        "schema_version": 1,
        **measured_with(module, args, trainer.model.config, device),
        "flops_counted_by": source,
        "forward_flop": total,
        "forward_backward_flop": both,  # always by torch.utils.flop_counter
        "ceilings": asdict(ceilings) if ceilings else None,
        "modules": rows,
    }
    stem = directory / f"{module.SCRIPT}_flops"
    write_text(stem.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
    write_csv(stem.with_suffix(".csv"), rows)

    fused = ", ".join(on) or "nothing"
    print(f"{module.SCRIPT} on {device_name}, batch size {args.batch_size}, fused: {fused}")
    print(f"FLOPs counted by {source}{how}, of the model with these fusions\n")
    print(table(rows, intensity, roofline) + "\n")
    print(f"Forward: {total / 1e9:.3f} GFLOP")
    print(f"Forward and backward: {both / 1e9:.3f} GFLOP (by torch.utils.flop_counter)")
    files = [stem.with_suffix(".csv"), stem.with_suffix(".json"), *([text] if text else [])]
    if ceilings:
        print(ceilings)
        files.append(directory / f"{module.SCRIPT}_roofline.png")
        labelled = {row["module"]: row for row in rows}
        draw(files[-1], f"{module.SCRIPT} forward on {device_name}", labelled, ceilings)
    print(f"Written: {', '.join(map(str, files))}")
    return 0


def count_script(own: argparse.Namespace, rest: list[str]) -> int:
    """Measure what the arguments ask for; returns the exit status."""
    roofline = own.generate_roofline
    if roofline and importlib.util.find_spec("matplotlib") is None:
        needs = "needs the package matplotlib (pip install matplotlib)"
        raise ToolError(f"--generate-roofline {needs}", status=4)
    module = load_script(own.script)
    if "--enable-cuda-graph" not in rest:
        rest.append("--disable-cuda-graph")  # V4's default, in which modules cannot be told apart
    _, args = script_arguments(module, rest, own.profile_dir)
    for attribute in ("torch_compile", "cuda_graph"):
        if getattr(args, attribute):
            flag = f"--enable-{attribute.replace('_', '-')}"
            reason = "there are no modules any more in what the device then runs"
            raise ToolError(f"{flag} does not fit here: {reason}")
    try:
        with sign_of_life("counting"):
            return measure(module, args, own.computational_intensity or roofline, roofline)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ToolError("out of memory: lower --batch-size or --seq-len", status=3) from error


def build_parser() -> Parser:
    """The command line."""
    parser = tool_parser(PROG, __doc__)
    parser.add_flag("--computational-intensity", "FLOP per byte of memory traffic")
    parser.add_flag("--generate-roofline", "the same against what this device reaches")
    return parser


main = program(build_parser, count_script, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())
