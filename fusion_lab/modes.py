"""What version scripts run for --verify-accuracy. `script` is the module of the version."""

import argparse
from types import ModuleType

from fusion_lab.accuracy import GRADIENT, judged_values, worst_of


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
