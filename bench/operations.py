#!/usr/bin/env python3
"""Time V3's kernels, forward and backward, beside what PyTorch and other libraries do for the same
operation.

All sides of a row are captured as CUDA graphs and replayed in short alternating turns, so that
neither the host nor a change of its speed counts. A study writes one file. A side that is not
installed, fails, or runs out of memory says so there. lab/baselines.py says what each library
is given. Two studies are of the whole training step: where its time goes, and how long it is beside
that of Hugging Face's Llama.

Examples:
  python bench/operations.py attention DIR   attention with pair bias: V3, libraries, their layouts
  python bench/operations.py triangle DIR    triangle multiplication: V3, V2, V1, cuEquivariance
  python bench/operations.py block DIR       a whole Evoformer block: V3, V2, cuEquivariance
  python bench/operations.py causal DIR      causal attention with grouped queries: V3, SDPA, cuDNN
  python bench/operations.py optimizer DIR   AdamW with float32 weights and bf16 copies: V4, others
  python bench/operations.py rows DIR        norms, SwiGLU, rotary: bytes per second, and a copy's
  python bench/operations.py step DIR        the newest step by kernel, and beside a reference
  python bench/operations.py llama DIR       the step: V4, V3, V2, Hugging Face, the same with Liger
  python bench/operations.py traffic DIR     bytes that a step of each version reads and writes
  python bench/operations.py table DIR       the tables, from what lies in DIR
  python bench/operations.py attention DIR --try attention_forward:BLOCK_M=128    V3 alone
"""

import _root

import argparse
import contextlib
import importlib
import itertools
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from lab.cli import needed

with needed():
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from bench.sizes import ALL_VERSIONS, MEDIUM, SHAPES, Shape, script_of
    from bench.sizes import PRECISIONS as ARGUMENTS
    from bench.version_tables import lines_of
    from lab.baselines import (
        AUTOTUNE,
        JoinedTriangle,
        Step,
        absent,
        attention_peers,
        cudnn_attention,
        cuequivariance_attention,
        fused_adam,
        hugging_face,
        library_attention,
        openfold_block,
        plain_attention,
        torch_adamw,
        with_cuequivariance,
        with_liger,
    )
    from lab.cli import Parser, ToolError, documented_parser, print_notes, program
    from lab.profile.ceilings import measure_ceilings, seconds
    from lab.profile.kernels import CATEGORIES, kernels_of, short_name
    from lab.profile.roofline import group_bytes
    from lab.show import Column, ended, render, side_columns
    from lab.study import Part, as_rows, by_side, measure_study, read_rows
    from lab.turns import (
        alternating,
        attempt,
        begin,
        captured,
        failure,
        free_memory,
        graph_of,
        make_trainer,
        named,
        parse_quiet,
        warm_up,
    )

PROG = Path(__file__).name
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PRECISIONS = {  # type of the tensors, and torch's precision of float32 products
    "bf16": (torch.bfloat16, "highest"),
    "TF32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}
# of triangle multiplication: samples, length
TRIANGLE = {f"N={n}": (1, n) for n in (256, 384, 512, 768, 1024)} | {"N=64, batch 4": (4, 64)}
# samples, rows, length, heads, head dimension
ATTENTION = {name: (samples, n, n, 4, 32) for name, (samples, n) in TRIANGLE.items()}
ATTENTION["MSA rows, N=256"] = (1, 128, 256, 8, 32)
LARGE = {"N=512", "N=768", "N=1024"}  # in bf16 only
BLOCK = {"crop": (1, 128, 256, 256, 8)}  # samples, sequences, length, MSA channels, MSA heads
# samples, length, heads, key heads, dimension
CAUSAL = {"S=512": (16, 512, 16, 8, 64), "S=2048": (4, 2048, 16, 8, 64)}
LLAMAS = {name: argv for name, (model, argv) in SHAPES.items() if model == "tiny_llama"}
OPTIMIZER = dict(LLAMAS)  # whose weights
LLAMAS["tiny_llama, medium, vocabulary 32000"] = [*MEDIUM.split(), "--vocab-size", "32000"]
# a longer step does not live in a cache; a graph of so long is measured well
SMALL_MS, ENOUGH_MS = (2, 50)
FLUSH_MB = 256  # several times the L2 cache of any GPU that we measure on
PROFILED = 3  # steps


def as_tuple(found: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """What an operation returns, also where it is a single tensor."""
    return (found,) if isinstance(found, Tensor) else found


def gradient_step(
    operation: Callable, inputs: list[Tensor], parameters: Sequence[Tensor] = ()
) -> Step:
    """Forward and backward with fixed gradients of the results -> these, and gradients of inputs
    and parameters."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    grads: list[Tensor] = []

    def results() -> Sequence[Tensor]:
        return as_tuple(operation(*inputs))

    def step() -> Sequence[Tensor]:
        found = results()
        if not grads:  # the first time
            grads.extend(torch.randn_like(result, requires_grad=False) for result in found)
        return *found, *torch.autograd.grad(found, [*inputs, *parameters], grads)

    step.forward = results
    return step


def extra_memory(step: Step) -> float | None:
    """Peak MB that a step takes beyond what there is before and after it; None on a CPU."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def held_memory(step: Step) -> float | None:
    """MB that a forward pass keeps for the backward one, its results apart.

    None on a CPU or if not told apart.
    """
    if not GPU or not hasattr(step, "forward"):
        return None
    before = torch.cuda.memory_allocated()
    found = step.forward()
    return (torch.cuda.memory_allocated() - before - sum(result.nbytes for result in found)) / 1e6


class Side:
    """A step that is measured: its graphs of `repeats` steps, and what was found, in `row`."""

    def __init__(self, step: Step, pool: object, flush: Step | None):
        step()
        self.row = {"extra_mb": extra_memory(step), "held_mb": held_memory(step), "turns_us": []}
        self.repeats = max(1, min(10, math.ceil(ENOUGH_MS / 1e3 / seconds(step, DEVICE))))
        warm_up(step)
        self.warm, self.cold = captured(step, self.repeats, pool), None
        self.warm()
        if flush and 1e3 * seconds(self.warm, DEVICE) / self.repeats < SMALL_MS:
            both = partial(after, flush, step)
            self.row["cold_turns_us"], self.cold = [], captured(both, self.repeats, pool)

    def take(self, flushed: float) -> None:
        """A turn: microseconds of a step, then with a cold cache, of which `flushed` are for
        emptying it."""
        self.row["turns_us"].append(1e6 * seconds(self.warm, DEVICE) / self.repeats)
        if self.cold:
            self.row["cold_turns_us"].append(
                1e6 * seconds(self.cold, DEVICE) / self.repeats - flushed
            )


def after(flush: Step, step: Step) -> Sequence[Tensor]:
    """A step that finds nothing of its own in the cache."""
    flush()
    return step()


def cache_flush() -> Step:
    """Reading a large buffer: it leaves lines in the L2 cache that need not be written back while
    the step runs."""
    buffer = torch.zeros(FLUSH_MB << 18, device=DEVICE)

    def flush() -> Sequence[Tensor]:
        return (buffer.sum(),)

    warm_up(flush)
    return flush


def steps_in_turns(sides: dict[str, Step], rounds: int, cold: bool = False) -> dict[str, dict]:
    """Microseconds per step of each side: the median of the turns, which change their order, and
    extra peak memory.

    A graph that is replayed finds in the L2 cache what its last step left there; `cold` times are
    those of short steps with a cache that was emptied before each. The graphs share their memory,
    since they never run beside each other. A side that runs out of memory, is not installed or
    fails has a `status` and an `error` in place of its times.
    """
    rows, ready = {}, {}
    pools = [torch.cuda.graph_pool_handle()] if GPU else [None]
    flush = cache_flush() if GPU and cold else None
    flushing = captured(flush, 10, pools[-1]) if flush else None

    def failed(name: str, error: Exception) -> None:
        missing = {"status": "missing"} if isinstance(error, ImportError) else {}
        rows[name] = failure(error) | missing
        print_notes(PROG, f"{name}: {rows[name]['error']}")
        if GPU:  # the old one may still belong to a capture that failed
            pools.append(torch.cuda.graph_pool_handle())

    def prepare(name: str) -> None:
        ready[name] = Side(sides[name], pools[-1], flush)
        rows[name] = ready[name].row

    for name in sides:
        attempt(name, partial(prepare, name), ready, failed)
        if GPU:
            torch.cuda.empty_cache()  # what the side took outside its graph is for the next one's
    for _, name in alternating(ready, rounds + 1):
        flushed = 1e6 * seconds(flushing, DEVICE) / 10 if flushing else 0.0
        attempt(name, partial(ready[name].take, flushed), ready, failed)
    for side in ready.values():
        for key in ("turns_us", "cold_turns_us"):
            if key in side.row:
                side.row[key] = side.row[key][1:]  # the first one warms up
                side.row[key.replace("turns_", "")] = statistics.median(side.row[key])
    ready.clear()
    free_memory()
    return rows


def optional(package: str) -> bool:
    """Is a library installed that a comparison can do without?"""
    try:
        importlib.import_module(package)
    except ImportError as error:
        print_notes(PROG, f"{package} is left out ({error})")
        return False
    return True


# Studies of one operation: each builds its sides for a shape, a type of the tensors and what is
# wanted of it. The libraries' sides, and what each of them is given, are in lab/baselines.py.


@dataclass(frozen=True)
class Wanted:
    """What a study is to measure: all its `shapes` if none is named; V3's side `alone` or all."""

    rounds: int = 15
    precisions: Sequence[str] = ("bf16",)
    shapes: Sequence[str] = ()
    # the shapes of which torch.compile has a side with all its tuning: it takes a minute
    autotuned: Sequence[str] = ()
    megafold: Path = Path("no clone")
    openfold: Path = Path("no clone")
    alone: bool = False


def wanted_parts(study: str, wanted: Wanted) -> Iterator[Part]:
    """Rows of a study. Large shapes are measured in bf16 only, unless they are named."""
    shapes, sides_of = STUDIES[study]
    for precision, name in itertools.product(wanted.precisions, shapes):
        asked = name in wanted.shapes if wanted.shapes else precision == "bf16" or name not in LARGE
        if asked:
            names = {"shape": name, "precision": precision}
            yield names, partial(measure_shape, sides_of, name, shapes[name], precision, wanted)


def measure_shape(
    sides_of: Callable, name: str, sizes: tuple, precision: str, wanted: Wanted
) -> list[dict]:
    """A row for each side, in turns, with this precision of float32 products."""
    dtype, products = PRECISIONS[precision]
    with matmul_precision(products):
        autotune = name in wanted.autotuned and dtype == torch.bfloat16
        sides = sides_of(sizes, dtype, autotune, wanted)
        return as_rows(steps_in_turns(sides, wanted.rounds, cold=True))


@contextlib.contextmanager
def matmul_precision(products: str) -> Iterator[None]:
    """Float32 products with this precision, and then as before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention(sizes: tuple, dtype: torch.dtype, autotune: bool, wanted: Wanted) -> dict[str, Step]:
    """Attention with pair bias and gate on the packed result of the projection; libraries also in
    their own layout.

    There they do less: attention alone, without the gate and without what changes the layout.
    """
    samples, rows, length, heads, dim = sizes
    packed = torch.randn(samples, rows, length, heads, 4, dim, device=DEVICE, dtype=dtype)
    gate_bias = torch.randn(heads * dim, device=DEVICE)
    bias = torch.randn(samples, heads, length, length, device=DEVICE, dtype=dtype)
    ours = importlib.import_module("tiny_openfold_v3").GatedAttentionFunction.apply
    inputs = [packed, gate_bias, bias]
    if wanted.alone:
        return {"triton": gradient_step(ours, inputs)}
    operations = {"triton": ours, "SDPA": library_attention}
    operations["torch.compile"] = torch.compile(plain_attention)
    if autotune:
        operations["torch.compile, max-autotune"] = torch.compile(plain_attention, mode=AUTOTUNE)
    operations["cuEquivariance"] = cuequivariance_attention
    sides = {side: gradient_step(operation, inputs) for side, operation in operations.items()}
    q, k, v, _ = (t.contiguous() for t in packed.transpose(2, 3).unbind(4))
    for side, (operation, own) in attention_peers(q, k, v, bias, wanted.megafold).items():
        sides[f"{side}, own layout"] = gradient_step(operation, own)
    return sides


def with_weights(module: torch.nn.Module) -> torch.nn.Module:
    """The module on the device, with the same weights in every version: some begin with what lies
    in memory."""
    generator = torch.Generator().manual_seed(42)
    state = module.state_dict()  # canonical names
    for name in sorted(state):
        if "norm" not in name:
            drawn = torch.randn(state[name].shape, generator=generator)
            state[name] = drawn / drawn.shape[-1] ** 0.5
    module.load_state_dict(state)
    return module.to(DEVICE)


def triangle(sizes: tuple, dtype: torch.dtype, autotune: bool, wanted: Wanted) -> dict[str, Step]:
    """Triangle multiplication: the whole module of each version, norms and gates included,
    dimension 128."""
    samples, length = sizes
    pair = torch.randn(samples, length, length, 128, device=DEVICE, dtype=dtype)

    def module_of(version: str) -> torch.nn.Module:
        module = importlib.import_module(f"tiny_openfold_{version}")
        build = module.TriangleMultiplicationOutgoing
        return with_weights(build(module.ModelConfig(), module.Fusions()))

    ours = module_of("v3")
    sides = {"triton": module_step(ours, ours, [pair], dtype)}
    if wanted.alone:
        return sides
    v2, v1 = module_of("v2"), module_of("v1")
    sides["V2"] = module_step(v2, v2, [pair], dtype)
    sides["torch.compile"] = module_step(torch.compile(v1), v1, [pair], dtype)
    if autotune:
        compiled = torch.compile(v1, mode=AUTOTUNE)
        sides["torch.compile, max-autotune"] = module_step(compiled, v1, [pair], dtype)
    theirs = JoinedTriangle(v1.state_dict(), "outgoing", torch.float32)
    sides["cuEquivariance"] = module_step(theirs, theirs, [pair], dtype)
    if dtype == torch.bfloat16:
        theirs = JoinedTriangle(v1.state_dict(), "outgoing", dtype)
        sides["cuEquivariance, bf16 parameters"] = step = module_step(theirs, theirs, [pair])
        step.unchecked = True
    return sides


def module_step(
    forward: Callable,
    model: torch.nn.Module,
    inputs: list[Tensor],
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Forward and backward of what uses a module's parameters, their gradients included.

    Autocast unless float32.
    """

    def operation(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        low = dtype != torch.float32
        with torch.autocast(DEVICE.type, dtype, enabled=low, cache_enabled=False):
            return forward(*inputs)

    return gradient_step(operation, inputs, list(model.parameters()))


def block(sizes: tuple, dtype: torch.dtype, autotune: bool, wanted: Wanted) -> dict[str, Step]:
    """A whole Evoformer block without embedding, heads and optimizer.

    V2 also with cuEquivariance's operations.
    """
    samples, depth, length, msa_dim, heads = sizes
    msa = torch.randn(samples, depth, length, msa_dim, device=DEVICE, dtype=dtype)
    inputs = [msa, torch.randn(samples, length, length, 128, device=DEVICE, dtype=dtype)]

    config_of = importlib.import_module("tiny_openfold_v1").ModelConfig
    config = config_of(msa_dim=msa_dim, num_heads_msa=heads)

    def block_of(version: str) -> torch.nn.Module:
        module = importlib.import_module(f"tiny_openfold_{version}")
        return with_weights(module.EvoformerBlock(config, module.Fusions()))

    ours = block_of("v3")  # called as the whole model calls it
    sides = {"triton": module_step(ours.with_cast_weights, ours, inputs, dtype)}
    if wanted.alone:
        return sides
    v2, theirs = block_of("v2"), with_cuequivariance(block_of("v2"))
    sides["V2"] = module_step(v2, v2, inputs, dtype)
    sides["V2, torch.compile"] = module_step(torch.compile(v2), v2, inputs, dtype)
    if autotune:
        compiled = torch.compile(v2, mode=AUTOTUNE)
        sides["V2, torch.compile, max-autotune"] = module_step(compiled, v2, inputs, dtype)
    compiled = torch.compile(theirs)
    sides["V2 with cuEquivariance, torch.compile"] = module_step(compiled, theirs, inputs, dtype)
    if dtype == torch.bfloat16:
        theirs = with_cuequivariance(block_of("v2").to(dtype))
        compiled = torch.compile(theirs)
        sides["the same, bf16 parameters"] = step = module_step(compiled, theirs, inputs)
        step.unchecked = True
    try:
        theirs = openfold_block(v2, config, wanted.openfold)
    except ImportError as error:
        sides["OpenFold"] = partial(absent, error)
    else:
        sides["OpenFold"] = module_step(theirs, theirs, inputs, dtype)
        sides["OpenFold, torch.compile"] = module_step(torch.compile(theirs), theirs, inputs, dtype)
    return sides


def causal(sizes: tuple, dtype: torch.dtype, autotune: bool, wanted: Wanted) -> dict[str, Step]:
    """Causal attention from the packed QKV result to the input of the output projection.

    In their own layout libraries begin with q, k and v apart, as [B, S, H, D] in memory, which is
    what their flash kernels read and write without a copy.
    """
    samples, length, heads, kv_heads, dim = sizes
    ours = importlib.import_module("tiny_llama_v3").CausalAttention.apply
    qkv = torch.randn(samples, length, heads + 2 * kv_heads, dim, device=DEVICE, dtype=dtype)
    grouped = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)

    def split(qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)

    def repeating(qkv: Tensor) -> Tensor:
        q, k, v = split(qkv)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    sides = {"triton": gradient_step(lambda qkv: ours(qkv, heads), [qkv])}
    if wanted.alone:
        return sides
    sides["SDPA, grouped"] = gradient_step(lambda qkv: grouped(*split(qkv)).transpose(1, 2), [qkv])
    sides["SDPA, repeated"] = gradient_step(repeating, [qkv])
    own = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in split(qkv)]
    sides["SDPA, own layout"] = gradient_step(grouped, own)
    cudnn = partial(cudnn_attention, is_causal=True, enable_gqa=True)
    sides["cuDNN, own layout"] = gradient_step(cudnn, own)
    return sides


def optimizer(
    sizes: list[str], dtype: torch.dtype, autotune: bool, wanted: Wanted
) -> dict[str, Step]:
    """AdamW over a model's weights in float32, and their copies in bfloat16 for products."""
    v4 = importlib.import_module("tiny_llama_v4")
    trainer = make_trainer(v4, [*sizes, *ARGUMENTS["bf16"], "--disable-cuda-graph"])
    for buffer in trainer.optimizer.gradients:
        for parameter in buffer.parameters:
            parameter.grad = buffer.part(parameter).normal_()
    gradients = [(buffer, buffer.tensor) for buffer in trainer.optimizer.gradients]

    def ours() -> Sequence[Tensor]:
        # a step lets go of them: a backward pass would have written new ones there
        for buffer, tensor in gradients:
            buffer.tensor = tensor
        trainer.optimizer.step()
        return ()

    weights = [parameter.detach() for parameter in trainer.model.parameters()]

    def masters() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(weight.clone()) for weight in weights]

    low = [weight.to(dtype) for weight in weights]
    sides = {"triton": ours}
    if wanted.alone:
        return sides
    sides["PyTorch fused, float32 gradients"] = torch_adamw(masters(), low, narrow=False)
    sides["PyTorch fused, bf16 gradients"] = torch_adamw(masters(), low, narrow=True)
    sides["Transformer Engine"] = fused_adam("transformer_engine.pytorch.optimizers", low)
    sides["Apex"] = fused_adam("apex.optimizers", low)
    return sides


STUDIES = {  # shapes and sides
    "attention": (ATTENTION, attention),
    "triangle": (TRIANGLE, triangle),
    "block": (BLOCK, block),
    "causal": (CAUSAL, causal),
    "optimizer": (OPTIMIZER, optimizer),
}


# Kernels that move bytes


def row_operators(rows: int) -> Iterator[tuple[str, str, list]]:
    """Script, operator and arguments, at sizes of the models' wider settings, beyond any cache."""
    bf16, make = torch.bfloat16, torch.randn
    x, low = make(rows, 1024, device=DEVICE), make(rows, 1024, device=DEVICE, dtype=bf16)
    weight, sums = torch.ones(1024, device=DEVICE), make(rows, device=DEVICE)
    llama, openfold = "tiny_llama_v3", "tiny_openfold_v3"
    yield llama, "rms_norm_forward", [x, low, weight, 1e-5, bf16]
    yield llama, "rms_norm_backward", [low, x, x.clone(), weight, sums]
    wide, half = make(rows, 2048, device=DEVICE, dtype=bf16), low
    yield llama, "swiglu_forward", [wide]
    yield llama, "swiglu_backward", [half, wide]
    qkv, angle = wide.view(-1, 512, 32, 64), make(512, 1, 64, device=DEVICE)
    yield llama, "rotary", [qkv, angle, angle, 8, 1]
    logits = make(rows, 2000, device=DEVICE, dtype=bf16)
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    yield llama, "cross_entropy_forward", [logits, targets]
    yield llama, "cross_entropy_backward", [sums, logits, targets, sums]
    pair, scale = make(8 * rows, 128, device=DEVICE), torch.ones(128, device=DEVICE)
    yield openfold, "layer_norm_forward", [pair, scale, scale, None, 1e-5, bf16, False]
    inputs = [pair.to(bf16), None, pair, scale, scale, None]
    yield openfold, "layer_norm_backward", [*inputs, 1e-5, False, True]
    yield openfold, "column_sums", [pair.to(bf16), torch.float32]
    yield openfold, "bias_relu_forward", [wide.view(-1, 512), torch.ones(512, device=DEVICE)]
    out = wide.view(-1, 512)
    yield openfold, "bias_relu_backward", [out, out.clone(), torch.float32, True]


def rows(rounds: int, count: int) -> Iterator[Part]:
    """Rows of the study: bytes that an operator must read and write over its time, and over the
    rate of a copy."""
    source = torch.randn(64 * count * 16 if GPU else count, device=DEVICE)
    for script, operator, arguments in row_operators(count):
        function = getattr(importlib.import_module(script), operator)
        yield {"operator": operator}, partial(beside_a_copy, function, arguments, source, rounds)


def beside_a_copy(function: Callable, arguments: list, source: Tensor, rounds: int) -> list[dict]:
    """A row of a function, with the bytes that it must read and write and their rate, and one of
    copying `source`."""
    target = torch.empty_like(source)

    def copy() -> Sequence[Tensor]:
        return (target.copy_(source),)

    def step() -> Sequence[Tensor]:
        return as_tuple(function(*arguments))

    moved = sum(t.nbytes for t in (*arguments, *step()) if isinstance(t, Tensor))
    sides = steps_in_turns({"kernel": step, "copy": copy}, rounds)
    check_ours(sides)
    for side, count in (("kernel", moved), ("copy", 2 * source.nbytes)):
        sides[side] |= {"bytes": count, "gb_per_s": count / sides[side]["us"] / 1e3}
    longer = over(sides["copy"], sides["kernel"])
    sides["kernel"]["of_copy"] = longer * moved / (2 * source.nbytes)
    return as_rows(sides)


# The whole training step


def of_models(wanted: Wanted) -> Iterator[tuple[str, tuple[str, Shape]]]:
    """Precisions, and sizes of whole models with their names: all if none is named."""
    chosen = {name: SHAPES[name] for name in wanted.shapes or SHAPES}
    return itertools.product(wanted.precisions, chosen.items())


def whole_step(wanted: Wanted) -> Iterator[Part]:
    """Rows of the study: the newest version's step, as a graph where there is a GPU, its kernels,
    and a reference."""
    for precision, (name, shape) in of_models(wanted):
        script = script_of(shape.model, ALL_VERSIONS[-1])
        argv = graph_of([*shape.argv, *ARGUMENTS[precision]])
        names = {"shape": name, "precision": precision, "script": script}
        yield names, partial(kernels_and_reference, script, argv, wanted.rounds)


def kernels_and_reference(script: str, argv: list[str], rounds: int) -> dict:
    """Time of a step, its kernels, and a reference.

    The reference has two parts: the FLOP of the unfused model, as the scripts count them, at the
    rate of a large GEMM, and the bytes that its operators read and write, once each, at the rate of
    a large copy. It is no bound: every fusion lowers these bytes, and caches can be faster than a
    copy.
    """
    module = importlib.import_module(script)
    run, steps, _ = begin(module, parse_quiet(module, argv), rounds)
    turns = [run.take(steps).step_ms for _ in range(rounds)]
    run.count()
    side = named(script, argv, run.args)
    trainer, flop = run.trainer, run.flops
    launched = kernels_of(trainer.trace(trainer.profile(PROFILED))["traceEvents"])
    moved = group_bytes(trainer, module.NO_WORK).total()
    ceilings = measure_ceilings(run.args, run.device)
    del run, trainer
    free_memory()
    times = defaultdict(list)
    for kernel in launched:
        times[short_name(kernel.name), kernel.category].append(kernel.duration_ns / 1e3)
    kernels = [
        {"name": name, "category": category, "calls": len(us) / PROFILED, "us": sum(us) / PROFILED}
        for (name, category), us in times.items()
    ]
    ms = statistics.median(turns)
    gemm_ms, copy_ms = flop / ceilings.gemm_tflops / 1e9, moved / ceilings.copy_gb_per_s / 1e6
    return {
        **side,
        **{"batch_ms": ms, "turns_ms": turns, "flop": flop, "bytes": moved},
        **{"gemm_ms": gemm_ms, "copy_ms": copy_ms, "over_reference": ms / (gemm_ms + copy_ms)},
        "ceilings": asdict(ceilings),
        "kernels": sorted(kernels, key=lambda kernel: -kernel["us"]),
    }


def traffic(wanted: Wanted) -> Iterator[Part]:
    """Rows of the study: what the operators of a step read and write, of each version."""
    for precision, (name, shape) in of_models(wanted):
        argv = [*shape.argv, *ARGUMENTS[precision]]
        yield {"shape": name, "precision": precision}, partial(gigabytes, shape.model, argv)


def gigabytes(model: str, argv: list[str]) -> list[dict]:
    """A row with the GB per step of each version."""
    moved = {}
    for version in ALL_VERSIONS:
        script = script_of(model, version)
        module = importlib.import_module(script)
        trainer = make_trainer(module, argv)
        trainer.step()  # the first one does more
        gb = group_bytes(trainer, module.NO_WORK).total() / 1e9
        moved[version] = named(script, argv, trainer.args) | {"gb": gb}
        del trainer
        free_memory()
    return as_rows(moved)


# The whole training step beside Hugging Face's Llama


def training_step(
    forward: Callable, model: torch.nn.Module, batch: dict[str, Tensor], dtype: torch.dtype
) -> Step:
    """Forward under autocast, backward and optimizer, always on the same batch -> the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=GPU)

    def step() -> Sequence[Tensor]:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            out = forward(**batch)
        loss = out if isinstance(out, Tensor) else out.loss  # transformers gives more than the loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (loss.detach(),)

    return step


def one_step(trainer, batch: dict[str, Tensor]) -> Sequence[Tensor]:
    """A training step of a version's own trainer -> the loss."""
    return (trainer.compute(batch),)


def llama(wanted: Wanted) -> Iterator[Part]:
    """Rows of the study: whole steps of V2 to V4, of Hugging Face's Llama, and that with Liger."""
    for precision, (name, sizes) in itertools.product(wanted.precisions, LLAMAS.items()):
        if not wanted.shapes or name in wanted.shapes:
            names = {"shape": name, "precision": precision}
            yield names, partial(llamas_in_turns, sizes, precision, wanted.rounds)


def llamas_in_turns(sizes: list[str], precision: str, rounds: int) -> list[dict]:
    """A row for each side.

    Liger's loss asks the device for a number, which no graph can: that side is eager.
    """
    dtype, products = PRECISIONS[precision]
    sides = {}
    with matmul_precision(products):
        for version in ("V4", "V3", "V2"):
            module = importlib.import_module(script_of("tiny_llama", version))
            if version == "V4":  # which has an optimizer of its own
                argv = [*sizes, *ARGUMENTS[precision], "--disable-cuda-graph"]
                trainer = make_trainer(module, argv)
                sides["V4"] = partial(one_step, trainer, trainer.next_batch())
                continue
            args = module.parse_args(sizes)
            ours = module.build_model(args, DEVICE)
            batch = module.make_batches(args, DEVICE, args.seed).next_batch()
            sides[version] = training_step(ours, ours, batch, dtype)
        for side, made_fast in libraries_llamas().items():
            model = hugging_face(ours)
            sides[side] = training_step(made_fast(model), model, batch, dtype)
            sides[side].eager = side == EAGER
        return as_rows(steps_in_turns(sides, rounds))


EAGER = "Liger, eager"


def libraries_llamas() -> dict[str, Callable]:
    """What is made of Hugging Face's Llama: all that is installed."""
    if not optional("transformers"):
        return {}
    theirs = {"Hugging Face": lambda model: model, "Hugging Face compiled": torch.compile}
    if optional("liger_kernel"):
        without = partial(with_liger, fused_linear_cross_entropy=False)
        theirs |= {EAGER: with_liger, "Liger but its loss": without}
    return theirs


# in bf16 if nothing else is asked for
STEPS = {"step": whole_step, "llama": llama, "traffic": traffic}


def with_blocks(study: str, wanted: Wanted, tried: Sequence[str]) -> Iterator[Part]:
    """V3's side of a study with the block sizes of the script, and with those that are tried."""
    module = importlib.import_module("tiny_llama_v3" if study == "causal" else "tiny_openfold_v3")
    for text in ("", *tried):
        for names, measure in wanted_parts(study, replace(wanted, alone=True)):
            names = {"blocks": text or "as they are", **names}
            yield names, partial(with_these, module, text, measure)


def with_these(module: ModuleType, blocks: str, measure: Callable[[], dict]) -> dict:
    """What is measured with these blocks, after which the script has its own again."""
    try:
        module.use_blocks(blocks or "default")
        return measure()
    finally:
        module.use_blocks("default")


def check_ours(sides: Mapping[str, dict]) -> None:
    """ToolError if one of our kernels failed.

    That others do, or that memory is short, is a result.
    """
    for name, side in sides.items():
        if name in ("triton", "kernel", "copy") and side.get("status") == "failed":
            raise ToolError(f"{name}: {side['error']}", status=1)


def over(first: dict, second: dict, key: str = "turns_us") -> float | None:
    """How many times as long the first side takes: the median over the turns."""
    if key not in first or key not in second:
        return None
    return statistics.median(a / b for a, b in zip(first[key], second[key], strict=True))


def lines_in(path: Path) -> tuple[list[dict], list[str]]:
    """The sides of a study, a row for each shape and precision with its name; and their names."""
    rows = read_rows(path, ("shape", "precision", "side"))
    sides = dict.fromkeys(row["side"] for row in rows)
    return lines_of(by_side(rows, "shape", "precision")), [*sides]


def best_of_others(sides: Mapping) -> str | None:
    """The fastest side beside our kernel."""
    others = [name for name in sides if name not in ("name", "triton")]
    finished = [name for name in others if "us" in sides[name]]
    return min(finished, key=lambda name: sides[name]["us"], default=None)


def over_ours(sides: Mapping, key: str = "turns_us") -> float | None:
    """How many times as long as our kernel the best of the others takes."""
    best = best_of_others(sides)
    return over(sides[best], sides["triton"], key) if best else None


def best_ratio(sides: Mapping) -> str:
    """The best of the others over ours, and its name."""
    ratio = over_ours(sides)
    return f"{ratio:.2f}x ({best_of_others(sides)})" if ratio else ""


def cold_ratio(sides: Mapping) -> str:
    """The same with a cold cache, where it differs by more than 5 %."""
    warm, cold = over_ours(sides), over_ours(sides, "cold_turns_us")
    return f"{cold:.2f}x" if warm and cold and abs(cold / warm - 1) > 0.05 else ""


def memory_of(side: Mapping) -> str:
    """MB at the peak, and held for the backward pass; or how the side ended."""
    mb = (side[key] for key in ("extra_mb", "held_mb") if side.get(key) is not None)
    return " / ".join(dict.fromkeys(f"{value:.0f}" for value in mb)) or ended(side) or ""


def sides_tables(directory: Path, study: str) -> list[str]:
    """Time of each side, the best of the others over ours; then memory."""
    rows, sides = lines_in(directory / f"{study}.json")
    work = "a step" if study == "optimizer" else "forward + backward"
    times = [
        Column(f"{study}, {work}, warm L2", "name"),
        *side_columns("{}, us", sides, "us", ".0f", ends=True),
        Column("best of the others / triton", best_ratio),
    ]
    if any(map(cold_ratio, rows)):
        times.append(Column("with a cold L2 cache", cold_ratio))
    memory = side_columns("{}", sides, memory_of)
    tables = [render(times, rows)] if rows else []
    if any(column.of(row) for row in rows for column in memory):
        tables.append(render([Column(f"{study}, MB at the peak / held", "name"), *memory], rows))
    return tables


def rows_table(directory: Path) -> str:
    """Rate of each kernel that moves bytes."""
    rows = read_rows(directory / "rows.json", ("operator", "side", "bytes", "gb_per_s"))
    columns = [
        Column("operator", "operator"),
        Column("MB", lambda row: row["bytes"] / 1e6, ".0f"),
        Column("GB/s", "gb_per_s", ".0f"),
        Column("of a copy's rate", lambda row: 100 * row["of_copy"], ".0f", " %"),
    ]
    return render(columns, [row for row in rows if row["side"] == "kernel"]) if rows else ""


def step_tables(directory: Path) -> list[str]:
    """The whole step beside its reference, the time of each category, the ten longest kernels."""
    rows = read_rows(directory / "step.json")
    if not rows:
        return []
    names = [f"{row['shape']}, {row['precision']}" for row in rows]
    spent = []  # microseconds of each category
    for row in rows:
        spent.append(Counter())
        for kernel in row["kernels"]:
            spent[-1][kernel["category"]] += kernel["us"]
    whole = [
        Column("whole step", lambda i: names[i]),
        Column("ms", lambda i: rows[i]["batch_ms"], ".2f"),
        Column("in kernels, ms", lambda i: spent[i].total() / 1e3, ".2f"),
        Column("FLOPs as a large GEMM, ms", lambda i: rows[i]["gemm_ms"], ".2f"),
        Column("bytes as a copy, ms", lambda i: rows[i]["copy_ms"], ".2f"),
        Column("step / both", lambda i: rows[i]["over_reference"], ".2f", "x"),
    ]
    by_category = [Column("us per step", str)]
    for name, us in zip(names, spent, strict=True):
        by_category.append(Column(name, us.__getitem__, ".0f"))
    categories = [name for name in CATEGORIES if any(name in us for us in spent)]
    tables = [render(whole, range(len(rows))), render(by_category, categories)]
    for name, row in zip(names, rows, strict=True):
        longest = [
            Column(name, "name"),
            Column("what it does", "category", text=True),
            Column("calls", "calls", "g"),
            Column("us per step", "us", ".0f"),
            Column("of the step", lambda k, ms=row["batch_ms"]: k["us"] / ms / 10, ".1f", " %"),
        ]
        tables.append(render(longest, row["kernels"][:10]))
    return tables


def llama_table(directory: Path) -> str:
    """The whole step of each side in milliseconds, its time over the first one's, memory."""
    rows, sides = lines_in(directory / "llama.json")
    if not rows:
        return ""
    first, *others = sides

    def milliseconds(side: Mapping) -> float | None:
        return side["us"] / 1e3 if "us" in side else None

    def over_first(name: str, row: Mapping) -> object:
        ratio = over(row[name], row[first]) if name in row else None
        return ratio or ""

    columns = [
        Column("whole step", "name"),
        *side_columns("{}, ms", sides, milliseconds, ".2f", ends=True),
        *(Column(f"{name} / {first}", partial(over_first, name), ".2f", "x") for name in others),
        *side_columns("{}, MB", sides, "extra_mb", ".0f", ends=True),
    ]
    return render(columns, rows)


def traffic_table(directory: Path) -> str:
    """GB per step of each version, and the part of V1's that V4 has left."""
    rows, _ = lines_in(directory / "traffic.json")

    def left(row: Mapping) -> float | None:
        return 100 * row["V4"]["gb"] / row["V1"]["gb"] if "V4" in row else None

    columns = [
        Column("GB read and written per step", "name"),
        *side_columns("{}", ("V1", "V2", "V3", "V4"), "gb", ".2f"),
        Column("V4 of V1", left, ".0f", " %"),
    ]
    return render(columns, rows) if rows else ""


def table(directory: Path) -> str:
    """The tables of one device as Markdown."""
    tables = [part for study in STUDIES for part in sides_tables(directory, study)]
    tables.append(rows_table(directory))
    tables += [*step_tables(directory), llama_table(directory), traffic_table(directory)]
    if not any(tables):
        raise ToolError(f"{directory}: no result files of these studies")
    return "\n\n".join(filter(None, tables))


def run_study(args: argparse.Namespace) -> int:
    """Measure, or print the tables; returns the exit status."""
    if args.what == "table":
        print(table(args.directory))
        return 0
    if args.tried and args.what not in STUDIES:
        raise ToolError(f"--try is for {', '.join(STUDIES)}, not for {args.what}")
    args.directory.mkdir(parents=True, exist_ok=True)
    shapes = args.shapes or ()
    known = STUDIES.get(args.what, (LLAMAS if args.what == "llama" else SHAPES,))[0]
    if unknown := [name for name in shapes if name not in known]:
        there = ", ".join(map(repr, known))
        raise ToolError(f"{args.what} has no shape {unknown[0]!r}; it has {there}")
    usual = ["bf16"] if args.what in (*STEPS, "optimizer") else list(PRECISIONS)
    precisions = args.precisions or usual
    wanted = Wanted(args.rounds, precisions, shapes, args.autotune, args.megafold, args.openfold)
    if args.what == "rows":
        measured = rows(args.rounds, args.rows)
    elif args.tried:
        measured = with_blocks(args.what, wanted, args.tried)
    elif args.what in STEPS:
        measured = STEPS[args.what](wanted)
    else:
        measured = wanted_parts(args.what, wanted)
    name = f"{args.what}_blocks" if args.tried else args.what
    path = args.directory / f"{name}.json"
    more = {"keep": args.keep, "renew": args.renew, "rounds": args.rounds}
    found = measure_study(path, list(measured), **more)
    for row in found if args.what in STUDIES and not args.tried else ():
        check_ours({row["side"]: row})
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add("what", choices=(*STUDIES, "rows", *STEPS, "table"))
    add("directory", type=Path)
    parser.add_count("--rounds", 15, "turns of each side")
    precisions = "(default: all; bf16 for step and llama)"
    add("--precisions", nargs="+", choices=PRECISIONS, help=precisions)
    shapes = "of any study but rows (default: all)"
    add("--shapes", nargs="+", metavar="SHAPE", help=shapes)
    tuned = "of which torch.compile is tuned, too (minutes)"
    add("--autotune", nargs="*", default=(), metavar="SHAPE", help=tuned)
    for library, study in (("MegaFold", "attention"), ("OpenFold", "block")):
        clone = {"type": Path, "default": Path("no clone"), "metavar": "CLONE"}
        add(f"--{library.lower()}", **clone, help=f"of {library}, for {study}")
    parser.add_flag("--keep", "add to the rows of an earlier file, and measure none of them again")
    parser.add_flag("--renew", "measure those rows of an earlier file again that this one would")
    parser.add_count("--rows", 65536, "of the study of that name", least=512)
    blocks = {"nargs": "+", "default": [], "dest": "tried", "metavar": "BLOCKS"}
    add("--try", **blocks, help="as --blocks of the script; many in quotes")
    return parser


main = program(build_parser, run_study)

if __name__ == "__main__":
    sys.exit(main())
