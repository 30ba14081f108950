"""Steps of any kind as CUDA graphs that are replayed in short alternating turns: their time and
their memory.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fusion_lab.cli import note
from fusion_lab.turns import GraphSide, failure, scheduled

Step = Callable[[], Sequence[Tensor]]  # what is done once, and what it leaves
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PRECISIONS = {  # type of the tensors, and torch's precision of float32 products
    "bf16": (torch.bfloat16, "highest"),
    "TF32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}
ENOUGH_MS = 50  # a graph of so long is measured well


@contextlib.contextmanager
def matmul_precision(products: str) -> Iterator[None]:
    """Float32 products with this precision, and then as before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def gradient_step(
    operation: Callable, inputs: list[Tensor], parameters: Sequence[Tensor] = ()
) -> Step:
    """Forward and backward with fixed gradients of the results -> these, and gradients of inputs
    and parameters."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    grads: list[Tensor] = []

    def results() -> Sequence[Tensor]:
        found = operation(*inputs)
        return (found,) if isinstance(found, Tensor) else found

    def step() -> Sequence[Tensor]:
        found = results()
        if not grads:  # the first time
            grads.extend(torch.randn_like(result, requires_grad=False) for result in found)
        return *found, *torch.autograd.grad(found, [*inputs, *parameters], grads)

    step.forward = results
    return step


def memory_of(step: Step) -> dict[str, float | None]:
    """Peak MB that a step takes beyond what there is before it, and MB that its forward pass keeps
    for the backward one, results apart; None on a CPU, or where these are not told apart."""
    extra = held = None
    if GPU:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        extra = (torch.cuda.max_memory_allocated() - before) / 1e6
    if GPU and hasattr(step, "forward"):
        before = torch.cuda.memory_allocated()
        found = step.forward()
        kept = torch.cuda.memory_allocated() - before
        held = (kept - sum(result.nbytes for result in found)) / 1e6
    return {"extra_mb": extra, "held_mb": held}


class StepSide(GraphSide):
    """A step that is measured: its graph, and the memory that it takes."""

    def __init__(self, step: Step, pools: list):
        step()
        self.memory = memory_of(step)
        super().__init__(step, ENOUGH_MS, pools[-1], most=10)
        self.graph()
        if GPU:
            torch.cuda.empty_cache()  # what it took outside its graph is for the next one's

    def finish(self, times: list[float]) -> dict:
        turns = [1e3 * ms for ms in times[1:]]  # the first one warms up
        return {**self.memory, "turns_us": turns, "us": statistics.median(turns)}


def steps_in_turns(sides: dict[str, Step], rounds: int) -> dict[str, dict]:
    """Microseconds per step of each side, the median of turns that change their order, and extra
    memory. A graph that is replayed finds in the L2 cache what its last step left there. The graphs
    share their memory. A side that fails, is not installed or runs out of memory has a `status` and
    an `error` in place of its times."""
    pools = [torch.cuda.graph_pool_handle()] if GPU else [None]

    def failed(name: str, error: Exception) -> dict:
        row = failure(error) | ({"status": "missing"} if isinstance(error, ImportError) else {})
        note(f"{name}: {row['error']}")
        if GPU:  # the old one may still belong to a capture that failed
            pools.append(torch.cuda.graph_pool_handle())
        return row

    starts = {name: partial(StepSide, step, pools) for name, step in sides.items()}
    return scheduled(starts, rounds + 1, failed)
