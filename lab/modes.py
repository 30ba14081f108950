"""What version scripts run in place of training, where a flag asks for it: --compare-fusion and
--verify-accuracy. `script` is the module of the version."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


class InFloat64(TorchFunctionMode):
    """Inside, what asks for float32 gets float64, so that a model in float64 stays in it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()

        def wide(value):
            return torch.float64 if value is torch.float32 else value

        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(wide, args), **kwargs)


def values_of(
    script: ModuleType, trainer, exact: bool = False, seed: int = 0
) -> dict[str, Tensor]:  # fmt: skip
    """Return outputs, loss and gradients by canonical name; a missing gradient is NaN.

    `exact`: in float64. With a `seed` the weights are off by up to a quarter of their last digit,
    so that everything is rounded differently. Afterwards the trainer is of no use.
    """
    args, batch, model, forward = trainer.args, trainer.next_batch(), trainer.model, trainer.forward
    context = trainer.autocast
    if seed:  # the last digit of a number near 1, as a matrix product takes it
        digit = 2.0 ** (-23 if args.matmul_precision == "highest" else -10)
        if args.use_amp:
            digit = torch.finfo(getattr(torch, args.amp_dtype)).eps
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.data *= (1 + digit / 2 * noise).to(parameter.device)
    if exact:
        model = forward = script.build_model(args, trainer.device).double()
        model.load_state_dict(trainer.model.state_dict())
        batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
        context = InFloat64
    with torch.no_grad(), context():
        outputs = forward(**{n: t for n, t in batch.items() if n not in model.TARGETS})
    values = dict(outputs) if isinstance(outputs, dict) else {"outputs": outputs}
    with context():  # anew: PyTorch 2.6 would reuse the weights that it cast without gradients
        values["loss"] = forward(**batch)
    scale = 1024  # a power of two: away from the smallest numbers of float16
    (scale * values["loss"]).backward()
    if trainer.average and not exact:
        trainer.average()
    for parameter in model.parameters():  # state_dict then splits gradients of fused weights
        grad = torch.full_like(parameter, math.nan) if parameter.grad is None else parameter.grad
        if exact and script.WORLD_SIZE > 1:  # as DDP or the optimizer does
            dist.all_reduce(grad)
            grad /= script.WORLD_SIZE
        parameter.data = grad.double() / scale
    values |= {f"gradient of {name}": grad for name, grad in model.state_dict().items()}
    return {name: value.detach().double() for name, value in values.items()}


def judge(
    exact: dict, unfused: list[dict], fused: dict, least: float
) -> dict[str, tuple[float, float]]:
    """Return each value's relative error and its limit.

    That is three times the largest error of the unfused runs, or `least` (at most 1e-3 for what is
    no gradient) if that is more; 0 where one of these is NaN. No norm counts for less than 1e-5 of
    that of all gradients. A gradient of zero in theory, as that of a bias which softmax takes out,
    is the noise of sums in another order: it counts for 1e-3 of all, or for `least` / 10.
    """
    norms = {name: float(value.norm()) for name, value in exact.items()}
    total = math.hypot(*(norm for name, norm in norms.items() if name.startswith("gradient")))
    judged = {}
    for name, norm in norms.items():
        norm = max(norm, total * (1e-5 if norm > 1e-12 * total else max(1e-3, least / 10)))
        sizes = [float((side[name] - exact[name]).norm()) for side in (fused, *unfused)]
        error, *errors = (size / norm if math.isfinite(size) else math.inf for size in sizes)
        floor = least if name.startswith("gradient") else min(least, 1e-3)
        judged[name] = error, max(floor, 3 * max(errors)) if max(errors) < math.inf else 0.0
    return judged


def least_limit(args: argparse.Namespace) -> float:
    """Return the error below which nothing is judged: a ReLU's argument may round beyond zero.

    In float32 that is rare: gradients of 1,056 positions were 1.9e-3 off for one seed of three,
    and 1e-6 for the others. In TF32 gradients of a model of 60 positions were 4 % off, and 5.5 %
    with 3 samples of 5 residues: below 100 residues or tokens one of them weighs more.
    """
    if args.use_amp or args.matmul_precision != "highest":
        return max(0.05, 0.5 / math.sqrt(args.batch_size * args.seq_len))
    return 3e-3


def judged_values(
    script: ModuleType,
    args: argparse.Namespace,
    make_trainer: Callable | None = None,
    fused: dict | None = None,
    least: float | None = None,
) -> dict[str, tuple[float, float]]:
    """Judge `fused`, what these arguments give unless they are another script's, by float64.

    In a small model a few roundings decide on the unfused one's error. So where one run of it does
    not explain an error, eight more may.
    """
    make_trainer = make_trainer or (lambda args: script.Trainer(args, script.prepare(args)))
    off = script.all_off(args)
    in_float64 = script.all_off(off, use_amp=False, matmul_precision="highest")
    exact = values_of(script, make_trainer(in_float64), exact=True)
    fused, unfused = fused or values_of(script, make_trainer(args)), []
    for seeds in range(1), range(1, 9):
        unfused += [values_of(script, make_trainer(off), seed=seed) for seed in seeds]
        judged = judge(exact, unfused, fused, least or least_limit(args))
        doubt = torch.tensor(int(any(e > limit for e, limit in judged.values())))
        if script.WORLD_SIZE > 1:  # together, or nobody averages gradients
            dist.all_reduce(doubt := doubt.to(args.device))
        if not doubt:
            break
    return judged


def verify_accuracy(script: ModuleType, args: argparse.Namespace) -> int:
    """Judge the outputs, loss and gradients of the initial weights by those in float64."""
    script.progress("outputs and gradients: in float64, with all off, and as chosen")
    judged = judged_values(script, args)
    script.progress()
    wrong = [name for name, (error, limit) in judged.items() if error > limit]
    gradients = [name for name in judged if name.startswith("gradient")]
    worst = max(gradients, key=lambda name: judged[name][0] / max(judged[name][1], 1e-300))
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
