"""What version scripts run in place of training, where a flag asks for it: --compare-fusion and
--verify-accuracy. `script` is the module of the version."""

import argparse
import statistics
from types import ModuleType

import numpy as np

from lab.accuracy import GRADIENT, judged_values, worst_of
from lab.turns import alternating, free_memory, ratios, verdict

TURNS = 10


def compare_fusion(script: ModuleType, args: argparse.Namespace) -> int:
    """Measure everything off (results in <profile-dir>/baseline) and as chosen, in turns."""
    off = script.all_off(args, profile_dir=args.profile_dir / "baseline")
    before, after = take_turns(script, off, args)
    if before["status"] == "oom":
        print("Both do not fit into memory side by side: each is measured alone, without ratios.")
        free_memory()
        status = script.finish(script.train(off))
        free_memory()
        return max(status, script.finish(script.train(args)))
    script.progress()
    if before["status"] == "ok":
        print_comparison(before, after)
    else:
        print(f"all off:\n{script.report(before)}\nas chosen:\n{script.report(after)}", end="")
    for error in {before["error"], after["error"]} - {None}:
        script.say("error", error)
    return max(before["exit_status"], after["exit_status"])


def take_turns(
    script: ModuleType, off: argparse.Namespace, args: argparse.Namespace
) -> list[dict]:  # fmt: skip
    """Return the results of both sides, whose steps are up to ten alternating turns."""
    runs = [script.Run(off, "all off: "), script.Run(args, "as chosen: ")]
    steps, turns = args.num_steps, min(TURNS, args.num_steps)
    with script.recorded(*runs):
        for run in runs:
            run.start()
        trainers = [run.trainer for run in runs if args.enable_rocm_profiling]
        with script.recorded_region(trainers):
            for turn, run in alternating(runs, turns):
                run.take(steps * (turn + 1) // turns - steps * turn // turns)
        trainers.clear()  # a run lets go of its own when all is counted
        for run in runs if not args.under_profiler else ():
            run.count(off=runs[0].kernels.get("per_step"))
    return [run.result() for run in runs]


def print_comparison(before: dict, after: dict) -> None:
    """Print the table of both sides, and what the ratios of their turns show."""
    times = ratios(before["timing"], after["timing"])
    print(f"\n{'':24}{'all off':>12}{'as chosen':>12}{'ratio':>9}")
    for label, group, key, digits in (
        ("batch time, ms", "timing", "turns_ms", 2),
        ("peak memory, MB", "memory", "peak_mb", 1),
        (f"{after['kernels'].get('unit', 'kernels')} per step", "kernels", "per_step", 0),
        ("final loss", "loss", "final", 4),
    ):
        if key in before[group] and key in after[group]:
            off, on = (np.median(side[group][key]) for side in (before, after))
            ratio = statistics.median(times) if key == "turns_ms" else off / on
            shown = f"{ratio:8.2f}x" if key != "final" else ""
            print(f"{label:24}{off:12.{digits}f}{on:12.{digits}f}{shown}")
    low, high = min(times), max(times)
    print(f"Batch time ratio in {len(times)} turns: {low:.2f}x to {high:.2f}x ({verdict(times)})")


def verify_accuracy(script: ModuleType, args: argparse.Namespace) -> int:
    """Judge the outputs, loss and gradients of the initial weights by those in float64."""
    script.progress("outputs and gradients: in float64, with all off, and as chosen")
    judged = judged_values(script, args)
    script.progress()
    wrong = [name for name, (error, limit) in judged.items() if error > limit]
    gradients = {name: pair for name, pair in judged.items() if name.startswith(GRADIENT)}
    worst = worst_of(gradients)
    for name, (error, limit) in judged.items():
        if name not in gradients or name in (worst, *wrong):
            label = f" (the worst of {len(gradients)})" if name == worst else ""
            verdict = ": FAIL" if name in wrong else ""
            print(f"{name}{label}: relative error {error:.2e}, limit {limit:.2e}{verdict}")
    if coarse := [name for name in gradients if judged[name][1] > 0.25]:
        some, first = f"{len(coarse)} of {len(gradients)} gradients", coarse[0].split()[-1]
        print(f"Note: rounding could hide an error of a quarter in {some} ({first})")
    print(f"Accuracy check: {'FAIL' if wrong else 'PASS'}")
    return 1 if wrong else 0
