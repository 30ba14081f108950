"""How long the steps of a version script take on a CPU, said before they begin."""

import contextlib
import time
from datetime import timedelta
from types import ModuleType
from typing import NoReturn

import torch
from torch import nn


def forecast(script: ModuleType, trainer: object, steps: int) -> None:
    """Say how long `steps` of this trainer will take if it is long, by two forward passes of one
    sample through the first layer, or one if it is slow."""
    if script.TRITON_FUSIONS:
        script.progress("measuring one layer, for how long the steps will take")
    args, model, times = trainer.args, trainer.model, []
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    batch = script.make_batches(args, trainer.device, args.seed).next_batch()
    sample = {name: value[:1] for name, value in batch.items()}

    def stop(*_: object) -> NoReturn:
        raise EOFError

    with layers[0].register_forward_hook(stop):
        while len(times) < 2 and sum(times) < 5:  # the first time does more
            started = time.perf_counter()
            with contextlib.suppress(EOFError), torch.no_grad(), trainer.autocast():
                model(**sample)
            times.append(time.perf_counter() - started)
    samples = steps * args.batch_size // script.WORLD_SIZE
    whole = round(3 * times[-1] * len(layers) * samples)  # the backward pass takes twice that
    if whole > 10:
        script.progress(f"the steps will take about {timedelta(seconds=whole)} on this CPU")
