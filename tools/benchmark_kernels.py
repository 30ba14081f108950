#!/usr/bin/env python3
"""Time V3's kernels, forward and backward, beside what PyTorch and other libraries do for the same operation.

All sides of a row are captured as CUDA graphs and replayed in short alternating turns, so that neither the host nor a
change of its speed counts. A study writes one file. What is not installed is left out, and said so. Two studies are of
the whole training step: where its time goes, and how long it is beside that of Hugging Face's Llama.

Examples:
  python tools/benchmark_kernels.py attention results/DIR   attention with pair bias and gate: V3, SDPA, torch.compile
  python tools/benchmark_kernels.py triangle results/DIR    triangle multiplication: V3, V2, V1 under torch.compile
  python tools/benchmark_kernels.py block results/DIR       a whole Evoformer block: V3, V2, V2 under torch.compile
  python tools/benchmark_kernels.py causal results/DIR      causal attention with grouped queries: V3, SDPA
  python tools/benchmark_kernels.py rows results/DIR        norms, SwiGLU, rotary: their bytes per second, and a copy's
  python tools/benchmark_kernels.py step results/DIR        the newest step by kernel, and how far it is from its floor
  python tools/benchmark_kernels.py llama results/DIR       the step: V4, V3, V2, Hugging Face, the same with Liger
  python tools/benchmark_kernels.py traffic results/DIR     bytes that a step of each version reads and writes
  python tools/benchmark_kernels.py table results/DIR       the tables, from what lies in DIR
  python tools/benchmark_kernels.py attention results/DIR --try attention_forward:BLOCK_M=128   block sizes, V3 alone
"""

import argparse
import importlib
import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from profiling.program import require  # noqa: E402

require("torch", "triton", "numpy")
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from profiling.ceilings import measure_ceilings  # noqa: E402
from profiling.kernels import CATEGORIES, kernels_of, short_name  # noqa: E402
from profiling.peers import hugging_face, with_liger  # noqa: E402
from profiling.program import ToolError, at_least, documented_parser, markdown_table, run_tool  # noqa: E402
from profiling.roofline import group_bytes  # noqa: E402
from profiling.turns import Part, begin, free_memory, graph_of, make_trainer, measure_study, read_rows  # noqa: E402
from tools.benchmark import PRECISIONS as ARGUMENTS  # noqa: E402
from tools.benchmark import (  # noqa: E402
    SHAPES,
    VERSIONS_OF,
)

PROG = Path(__file__).name
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PRECISIONS = {  # type of the tensors, and torch's precision of float32 products
    "bf16": (torch.bfloat16, "highest"),
    "TF32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}
ATTENTION = {  # samples, rows, length, heads, head dimension
    "N=256": (1, 256, 256, 4, 32),
    "N=384": (1, 384, 384, 4, 32),
    "N=64, batch 4": (4, 64, 64, 4, 32),
    "MSA rows, N=256": (1, 128, 256, 8, 32),
}
TRIANGLE = {"N=256": (1, 256), "N=384": (1, 384), "N=64, batch 4": (4, 64)}  # samples, length
BLOCK = {  # samples, sequences, length, MSA channels, MSA heads
    "crop": (1, 128, 256, 256, 8),
}
BLOCK_SIDES = {"triton": "v3", "V2": "v2", "V2, torch.compile": "v2"}
CAUSAL = {"S=512": (16, 512, 16, 8, 64), "S=2048": (4, 2048, 16, 8, 64)}  # samples, length, heads, key heads, dimension
PROFILED = 3  # steps
Step = Callable[[], Sequence[Tensor]]  # forward and backward once


def gradient_step(operation: Callable, inputs: list[Tensor], parameters: Sequence[Tensor] = ()) -> Step:
    """Forward and backward with fixed gradients of the results -> these, and gradients of inputs and parameters."""
    inputs = [t.detach().requires_grad_() for t in inputs]

    def results() -> tuple[Tensor, ...]:
        found = operation(*inputs)
        return (found,) if isinstance(found, Tensor) else found

    with torch.no_grad():
        grads = [torch.randn_like(result) for result in results()]

    def step() -> Sequence[Tensor]:
        found = results()
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
    """MB that a forward pass keeps for the backward one, its results apart; None on a CPU or if not told apart."""
    if not GPU or not hasattr(step, "forward"):
        return None
    before = torch.cuda.memory_allocated()
    found = step.forward()
    return (torch.cuda.memory_allocated() - before - sum(result.nbytes for result in found)) / 1e6


def captured(step: Step, repeats: int) -> Callable[[], None]:
    """So many steps as one graph; on a CPU as they are."""
    if not GPU:
        return lambda: [step() for _ in range(repeats)] and None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            step()
    return graph.replay


def seconds(run: Callable[[], None]) -> float:
    """Of one run, by the device's clock where there is one."""
    if not GPU:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def in_turns(sides: dict[str, Step], rounds: int, repeats: int = 10) -> dict[str, dict]:
    """Microseconds per step of each side: the median of the turns, which change their order, and extra peak memory."""
    rows, graphs = {}, {}
    for name, step in sides.items():
        step()
        rows[name] = {"extra_mb": extra_memory(step), "held_mb": held_memory(step), "turns_us": []}
        graphs[name] = captured(step, repeats)
    for turn in range(rounds + 1):
        for name in list(graphs) if turn % 2 else reversed(graphs):
            elapsed = 1e6 * seconds(graphs[name]) / repeats
            if turn:  # the first warms up
                rows[name]["turns_us"].append(elapsed)
    for row in rows.values():
        row["us"] = statistics.median(row["turns_us"])
    graphs.clear()
    free_memory()
    return rows


def optional(package: str) -> bool:
    """Is a library installed that a comparison can do without?"""
    try:
        importlib.import_module(package)
    except ImportError as error:
        print(f"{PROG}: note: {package} is left out ({error})", file=sys.stderr)
        return False
    return True


# Attention with pair bias and gate


def gated(out: Tensor, gate: Tensor, gate_bias: Tensor) -> Tensor:
    """out and gate [B, R, H, N, D], gate_bias [H x D] -> sigmoid(gate + gate_bias) * out, [B, R, N, H x D]."""
    gate = gate.transpose(2, 3) + gate_bias.view(out.shape[2], -1).to(gate.dtype)
    return (torch.sigmoid(gate) * out.transpose(2, 3)).flatten(3)


def plain_attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """With scores in memory, for torch.compile."""
    q, k, v, gate = qkvg.transpose(2, 3).unbind(4)
    out = (q @ k.mT / math.sqrt(q.shape[-1]) + bias[:, None]).softmax(-1) @ v
    return gated(out, gate, gate_bias)


def library_attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """As V2 does: samples and heads in one dimension, so that the bias is the same for all rows and is not copied."""
    samples, rows, length, heads, _, dim = qkvg.shape
    q, k, v, gate = qkvg.permute(4, 1, 0, 3, 2, 5).flatten(2, 3).unbind()  # [R, B x H, N, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.flatten(0, 1)[None])
    gate = gate.unflatten(1, (samples, heads)) + gate_bias.view(heads, 1, dim).to(gate.dtype)
    out = torch.sigmoid(gate) * out.unflatten(1, (samples, heads))
    return out.permute(1, 0, 3, 2, 4).reshape(samples, rows, length, heads * dim)


def cuequivariance_attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """NVIDIA's kernel for triangle attention, with the gate beside it."""
    from cuequivariance_torch import triangle_attention

    q, k, v, gate = qkvg.transpose(2, 3).unbind(4)  # [B, R, H, N, D]
    mask = torch.ones(*q.shape[:2], 1, 1, q.shape[3], dtype=torch.bool, device=q.device)
    out = triangle_attention(q.contiguous(), k.contiguous(), v.contiguous(), bias[:, None], mask)
    return gated(out, gate, gate_bias)


def attention(rounds: int, precisions: Sequence[str], alone: bool = False) -> Iterator[Part]:
    """Rows of the study, on request of V3's side alone."""
    ours = importlib.import_module("tiny_openfold_v3").GatedAttentionFunction.apply
    with_cuequivariance = not alone and optional("cuequivariance_torch")
    for precision, (name, (samples, rows, length, heads, dim)) in itertools.product(precisions, ATTENTION.items()):
        dtype, products = PRECISIONS[precision]
        torch.set_float32_matmul_precision(products)
        inputs = [
            torch.randn(samples, rows, length, heads, 4, dim, device=DEVICE, dtype=dtype),
            torch.randn(heads * dim, device=DEVICE),
            torch.randn(samples, heads, length, length, device=DEVICE, dtype=dtype),
        ]
        operations = {"triton": ours, "SDPA": library_attention, "torch.compile": torch.compile(plain_attention)}
        if with_cuequivariance and precision != "fp32":  # which its backward pass does not take
            operations["cuEquivariance"] = cuequivariance_attention
        chosen = ("triton",) if alone else operations
        sides = {side: gradient_step(operations[side], inputs) for side in chosen}
        yield {"shape": name, "precision": precision}, partial(in_turns, sides, rounds)


# Triangle multiplication


def triangle(rounds: int, precisions: Sequence[str], alone: bool = False) -> Iterator[Part]:
    """Rows of the study: the whole module of each version, norms and gates included, dimension 128."""
    with_cuequivariance = not alone and optional("cuequivariance_torch")
    for precision, (name, (samples, length)) in itertools.product(precisions, TRIANGLE.items()):
        dtype, products = PRECISIONS[precision]
        torch.set_float32_matmul_precision(products)
        pair, sides = torch.randn(samples, length, length, 128, device=DEVICE, dtype=dtype), {}
        for version in ("v3",) if alone else ("v3", "v2", "v1"):
            module = importlib.import_module(f"tiny_openfold_{version}")
            model = module.TriangleMultiplicationOutgoing(module.ModelConfig(), module.Fusions()).to(DEVICE)
            forward = torch.compile(model) if version == "v1" else model
            label = {"v3": "triton", "v2": "V2", "v1": "torch.compile"}[version]
            sides[label] = module_step(forward, model, [pair], dtype)
            if version == "v1" and with_cuequivariance and precision == "bf16":  # tuning takes minutes
                sides["cuEquivariance"] = module_step(cuequivariance_triangle(model), model, [pair], dtype)
        yield {"shape": name, "precision": precision}, partial(in_turns, sides, rounds)


def module_step(forward: Callable, model: torch.nn.Module, inputs: list[Tensor], dtype: torch.dtype) -> Step:
    """Forward under autocast and backward of what uses a module's parameters, their gradients included."""

    def operation(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            return forward(*inputs)

    return gradient_step(operation, inputs, list(model.parameters()))


def cuequivariance_triangle(model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    """NVIDIA's fused operation with the weights of V1's module."""
    from cuequivariance_torch import triangle_multiplicative_update

    def forward(pair: Tensor) -> Tensor:
        def stacked(*names: str) -> tuple[Tensor, Tensor]:
            linears = [getattr(model, f"linear_{name}") for name in names]
            return torch.cat([m.weight for m in linears]), torch.cat([m.bias for m in linears])

        (p, p_bias), (g, g_bias) = stacked("a_p", "b_p"), stacked("a_g", "b_g")
        return triangle_multiplicative_update(
            pair, direction="outgoing", mask=None,
            norm_in_weight=model.layer_norm_in.weight, norm_in_bias=model.layer_norm_in.bias,
            p_in_weight=p, p_in_bias=p_bias, g_in_weight=g, g_in_bias=g_bias,
            norm_out_weight=model.layer_norm_out.weight, norm_out_bias=model.layer_norm_out.bias,
            p_out_weight=model.linear_z.weight, p_out_bias=model.linear_z.bias,
            g_out_weight=model.linear_g.weight, g_out_bias=model.linear_g.bias,
        )  # fmt: skip

    return forward


# The whole Evoformer block


def block(rounds: int, precisions: Sequence[str], alone: bool = False) -> Iterator[Part]:
    """Rows of the study: one block of V3, of V2 and of V2 compiled, without embedding, heads and optimizer."""
    for precision, (name, sizes) in itertools.product(precisions, BLOCK.items()):
        dtype, products = PRECISIONS[precision]
        torch.set_float32_matmul_precision(products)
        samples, depth, length, msa_dim, heads = sizes
        msa = torch.randn(samples, depth, length, msa_dim, device=DEVICE, dtype=dtype)
        pair, sides = torch.randn(samples, length, length, 128, device=DEVICE, dtype=dtype), {}
        for side, version in {"triton": "v3"}.items() if alone else BLOCK_SIDES.items():
            module = importlib.import_module(f"tiny_openfold_{version}")
            config = module.ModelConfig(msa_dim=msa_dim, num_heads_msa=heads)
            model = module.EvoformerBlock(config, module.Fusions()).to(DEVICE)
            forward = model.with_cast_weights if version == "v3" else model  # as the whole model calls it
            forward = torch.compile(model) if side.endswith("torch.compile") else forward
            sides[side] = module_step(forward, model, [msa, pair], dtype)
        yield {"shape": name, "precision": precision}, partial(in_turns, sides, rounds)


# Causal attention


def causal(rounds: int, precisions: Sequence[str], alone: bool = False) -> Iterator[Part]:
    """Rows of the study: from the packed QKV result to the input of the output projection."""
    ours = importlib.import_module("tiny_llama_v3").CausalAttention.apply
    for precision, (name, (samples, length, heads, kv_heads, dim)) in itertools.product(precisions, CAUSAL.items()):
        dtype, products = PRECISIONS[precision]
        torch.set_float32_matmul_precision(products)

        def library(qkv: Tensor, heads: int = heads, kv_heads: int = kv_heads) -> Tensor:
            q, k, v = qkv.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        def repeating(qkv: Tensor, heads: int = heads, kv_heads: int = kv_heads) -> Tensor:
            q, k, v = qkv.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        qkv = torch.randn(samples, length, heads + 2 * kv_heads, dim, device=DEVICE, dtype=dtype)
        operations = {
            "triton": lambda qkv, heads=heads: ours(qkv, heads),
            "SDPA, grouped": library,
            "SDPA, repeated": repeating,
        }
        chosen = ("triton",) if alone else operations
        sides = {side: gradient_step(operations[side], [qkv]) for side in chosen}
        yield {"shape": name, "precision": precision}, partial(in_turns, sides, rounds)


# Kernels that move bytes


def row_operators(rows: int) -> Iterator[tuple[str, str, list]]:
    """Script, operator and arguments, at the sizes of the models' wider settings and beyond any cache."""
    bf16, make = torch.bfloat16, torch.randn
    x, low = make(rows, 1024, device=DEVICE), make(rows, 1024, device=DEVICE, dtype=bf16)
    weight, sums = torch.ones(1024, device=DEVICE), make(rows, device=DEVICE)
    llama, openfold = "tiny_llama_v3", "tiny_openfold_v3"
    yield llama, "rms_norm_forward", [x, low, weight, 1e-5, bf16]
    yield llama, "rms_norm_backward", [low, x, x.clone(), weight, sums, bf16]
    wide, half = make(rows, 2048, device=DEVICE, dtype=bf16), low
    yield llama, "swiglu_forward", [wide]
    yield llama, "swiglu_backward", [half, wide]
    qkv, angle = wide.view(-1, 512, 32, 64), make(512, 1, 64, device=DEVICE)
    yield llama, "rotary", [qkv, angle, angle, 8, 1]
    logits, targets = make(rows, 2000, device=DEVICE, dtype=bf16), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    yield llama, "cross_entropy_forward", [logits, targets]
    yield llama, "cross_entropy_backward", [sums, logits, targets, sums]
    pair, scale = make(8 * rows, 128, device=DEVICE), torch.ones(128, device=DEVICE)
    yield openfold, "layer_norm_forward", [pair, scale, scale, 1e-5, bf16]
    yield openfold, "layer_norm_backward", [pair.to(bf16), pair, scale, scale, 1e-5]
    yield openfold, "column_sums", [pair.to(bf16), torch.float32]
    yield openfold, "bias_relu_forward", [wide.view(-1, 512), torch.ones(512, device=DEVICE)]
    yield openfold, "bias_relu_backward", [wide.view(-1, 512), wide.view(-1, 512).clone(), torch.float32]


def rows(rounds: int, count: int) -> Iterator[Part]:
    """Rows of the study: bytes that an operator must read and write over its time, and over the rate of a copy."""
    source = torch.randn(64 * count * 16 if GPU else count, device=DEVICE)
    for script, operator, arguments in row_operators(count):
        function = getattr(importlib.import_module(script), operator)
        yield {"operator": operator}, partial(beside_a_copy, function, arguments, source, rounds)


def beside_a_copy(function: Callable, arguments: list, source: Tensor, rounds: int) -> dict:
    """Bytes that a function must read and write, their rate, and its share of the rate of copying `source`."""
    target = torch.empty_like(source)

    def copy() -> Sequence[Tensor]:
        return (target.copy_(source),)

    def step() -> Sequence[Tensor]:
        found = function(*arguments)
        return (found,) if isinstance(found, Tensor) else found

    moved = sum(t.nbytes for t in (*arguments, *step()) if isinstance(t, Tensor))
    sides = in_turns({"kernel": step, "copy": copy}, rounds)
    rates = {"kernel": moved / sides["kernel"]["us"] / 1e3, "copy": 2 * source.nbytes / sides["copy"]["us"] / 1e3}
    share = statistics.median(
        moved / k / (2 * source.nbytes / c)
        for k, c in zip(sides["kernel"]["turns_us"], sides["copy"]["turns_us"], strict=True)
    )
    return {"bytes": moved, "gb_per_s": rates, "of_copy": share, **sides}


# The whole training step


def whole_step(rounds: int, precisions: Sequence[str]) -> Iterator[Part]:
    """Rows of the study: the newest version's step, as a graph where there is a GPU, its kernels, and its floor."""
    for precision, (name, sizes) in itertools.product(precisions, SHAPES.items()):
        model = name.partition(",")[0]
        script = f"{model}_{VERSIONS_OF[model][-1]}"
        argv = graph_of([*sizes, *ARGUMENTS[precision]])
        yield {"shape": name, "precision": precision}, partial(kernels_and_floor, script, argv, rounds)


def kernels_and_floor(script: str, argv: list[str], rounds: int) -> dict:
    """Time of a step, its kernels, and its floor.

    The floor has two parts: the FLOP of the unfused model, as the scripts count them, at the rate of a large GEMM, and
    the bytes that its operators read and write, once each, at the rate of a large copy.
    """
    module = importlib.import_module(script)
    run, steps, _ = begin(module, argv, rounds)
    for _ in range(rounds):
        run.take(steps)
    run.result["timing"] |= run.timing()
    run.count()
    trainer, flop, turns = run.trainer, run.result["flops"]["per_step"], run.turns
    launched = kernels_of(trainer.trace(trainer.profile(PROFILED))["traceEvents"])
    moved, ceilings = group_bytes(trainer, module.NO_WORK).total(), measure_ceilings(run.args, run.device)
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
    floor = {"gemm_ms": flop / ceilings.gemm_tflops / 1e9, "copy_ms": moved / ceilings.copy_gb_per_s / 1e6}
    return {
        **{"ms": ms, "turns_ms": turns, "flop": flop, "bytes": moved},
        **{"floor": floor, "over_floor": ms / sum(floor.values()), "ceilings": asdict(ceilings)},
        "kernels": sorted(kernels, key=lambda kernel: -kernel["us"]),
    }


def traffic(precisions: Sequence[str]) -> Iterator[Part]:
    """Rows of the study: what the operators of a step read and write, of each version."""
    for precision, (name, sizes) in itertools.product(precisions, SHAPES.items()):
        argv = [*sizes, *ARGUMENTS[precision]]
        yield {"shape": name, "precision": precision}, partial(gigabytes, name.partition(",")[0], argv)


def gigabytes(model: str, argv: list[str]) -> dict[str, float]:
    """GB per step of each version."""
    moved = {}
    for version in VERSIONS_OF[model]:
        module = importlib.import_module(f"{model}_{version}")
        trainer = make_trainer(module, argv)
        trainer.step()  # the first one does more
        moved[version] = group_bytes(trainer, module.NO_WORK).total() / 1e9
        del trainer
        free_memory()
    return moved


# The whole training step beside Hugging Face's Llama


def training_step(forward: Callable, model: torch.nn.Module, batch: dict[str, Tensor], dtype: torch.dtype) -> Step:
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


def can_be_captured(side: str, step: Step) -> bool:
    """Otherwise a note says why not. A step that waits for the device is told apart before it spoils a capture."""
    try:
        step()
        if GPU:
            torch.cuda.set_sync_debug_mode("error")
            step()
            torch.cuda.set_sync_debug_mode("default")
            with torch.cuda.stream(torch.cuda.current_stream()):  # a capture that fails would leave its own
                captured(step, 1)
    except Exception as error:
        why = str(error).partition("\n")[0]
        print(f"{PROG}: note: {side} is left out: its step does not run as a graph here ({why})", file=sys.stderr)
        return False
    finally:
        if GPU:
            torch.cuda.set_sync_debug_mode("default")
    return True


def one_step(trainer, batch: dict[str, Tensor]) -> Sequence[Tensor]:
    """A training step of a version's own trainer -> the loss."""
    return (trainer.compute(batch),)


def llama(rounds: int, precisions: Sequence[str]) -> Iterator[Part]:
    """Rows of the study. Liger's loss comes with and without: it asks the device for a number, which no graph can."""
    theirs = {}
    if optional("transformers"):
        theirs = {"Hugging Face": lambda model: model, "Hugging Face compiled": torch.compile}
        if optional("liger_kernel"):
            theirs |= {"Liger": with_liger, "Liger but its loss": partial(with_liger, fused_linear_cross_entropy=False)}
    for precision, name in itertools.product(precisions, [name for name in SHAPES if name.startswith("tiny_llama")]):
        dtype, products = PRECISIONS[precision]
        torch.set_float32_matmul_precision(products)
        sides = {}
        for version in ("v4", "v3", "v2"):
            module = importlib.import_module(f"tiny_llama_{version}")
            if version == "v4":  # which has an optimizer of its own
                trainer = make_trainer(module, [*SHAPES[name], *ARGUMENTS[precision], "--disable-cuda-graph"])
                sides["V4"] = partial(one_step, trainer, trainer.next_batch())
                continue
            args = module.parse_args(SHAPES[name])
            ours = module.build_model(args, DEVICE)
            batch = module.make_batches(args, DEVICE, args.seed).next_batch()
            sides[version.upper()] = training_step(ours, ours, batch, dtype)
        for side, made_fast in theirs.items():
            model = hugging_face(ours)
            sides[side] = training_step(made_fast(model), model, batch, dtype)
        chosen = {side: step for side, step in sides.items() if can_be_captured(side, step)}
        yield {"shape": name, "precision": precision}, partial(in_turns, chosen, rounds)


STUDIES = {"attention": attention, "triangle": triangle, "block": block, "causal": causal}
STEPS = {"step": whole_step, "llama": llama, "traffic": lambda rounds, precisions: traffic(precisions)}  # bf16


def with_blocks(study: str, rounds: int, precisions: Sequence[str], tried: Sequence[str]) -> Iterator[Part]:
    """V3's side of a study with the block sizes of the script, and with each of those that are tried."""
    module = importlib.import_module("tiny_llama_v3" if study == "causal" else "tiny_openfold_v3")
    for text in ("", *tried):
        module.OVERRIDES.clear()
        module.OVERRIDES.update(module.read_blocks(part) for part in text.split())
        for names, measure in STUDIES[study](rounds, precisions, alone=True):
            yield {"blocks": text or "as they are", **names}, partial(unless_too_large, measure)


def unless_too_large(measure: Callable[[], dict]) -> dict:
    """What was measured, or why these blocks do not fit."""
    try:
        return measure()
    except triton.runtime.errors.OutOfResources as error:
        return {"error": str(error)}


def sides_table(directory: Path, study: str) -> str:
    """Time of each side, ours over the best of the others; extra memory at the peak, and held for the backward pass."""
    lines, sides = [], ["triton"]
    measured = read_rows(directory / f"{study}.json")
    for row in measured:
        sides += [name for name, value in row.items() if isinstance(value, dict) and name not in sides]
    for row in measured:
        others = {name: row[name] for name in sides[1:] if name in row}
        best = min(others, key=lambda name: others[name]["us"])
        turns = zip(others[best]["turns_us"], row["triton"]["turns_us"], strict=True)
        times = [f"{row[name]['us']:.0f}" if name in row else "" for name in sides]
        memory = [[row[name].get(kind) for kind in ("extra_mb", "held_mb")] if name in row else [] for name in sides]
        line = [
            f"{row['shape']}, {row['precision']}",
            *times,
            f"{statistics.median(o / t for o, t in turns):.2f}x ({best})",
        ]
        lines.append(line + [" / ".join(f"{mb:.0f}" for mb in both if mb is not None) for both in memory])
    header = [f"{study}, forward + backward", *(f"{name}, us" for name in sides), "best of the others / triton"]
    return markdown_table([*header, *(f"{name}, MB / held" for name in sides)], lines) if lines else ""


def rows_table(directory: Path) -> str:
    """Rate of each kernel that moves bytes."""
    lines = [
        [
            row["operator"],
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['gb_per_s']['kernel']:.0f}",
            f"{100 * row['of_copy']:.0f} %",
        ]
        for row in read_rows(directory / "rows.json")
    ]
    return markdown_table(["operator", "MB", "GB/s", "of a copy's rate"], lines) if lines else ""


def step_tables(directory: Path) -> list[str]:
    """The whole step and its floor, the time of each category, and the ten longest kernels of each shape."""
    measured = {f"{row['shape']}, {row['precision']}": row for row in read_rows(directory / "step.json")}
    if not measured:
        return []
    sums = {name: defaultdict(float) for name in measured}
    steps, categories, tables = [], [], []
    for name, row in measured.items():
        for part in row["kernels"]:
            sums[name][part["category"]] += part["us"]
        floor = row["floor"]
        numbers = row["ms"], sum(sums[name].values()) / 1e3, floor["gemm_ms"], floor["copy_ms"]
        steps.append([name, *(f"{ms:.2f}" for ms in numbers), f"{row['over_floor']:.2f}x"])
        longest = []
        for part in row["kernels"][:10]:
            share = f"{part['us'] / row['ms'] / 10:.1f} %"
            longest.append([part["name"], part["category"], f"{part['calls']:g}", f"{part['us']:.0f}", share])
        tables.append(markdown_table([name, "what it does", "calls", "us per step", "of the step"], longest, 2))
    for category in CATEGORIES:
        if any(category in parts for parts in sums.values()):
            categories.append([category, *(f"{parts[category]:.0f}" for parts in sums.values())])
    header = ["whole step", "ms", "in kernels, ms", "GEMM floor, ms", "bytes floor, ms", "step / sum of floors"]
    return [markdown_table(header, steps), markdown_table(["us per step", *measured], categories), *tables]


def llama_table(directory: Path) -> str:
    """The whole step of each side in milliseconds, its time over the first one's, and its extra memory."""
    measured = read_rows(directory / "llama.json")
    sides = list(dict.fromkeys(side for row in measured for side, value in row.items() if isinstance(value, dict)))
    lines = []
    for row in measured:
        here = [row.get(side) for side in sides]
        ratios = [
            s and here[0] and [a / b for a, b in zip(s["turns_us"], here[0]["turns_us"], strict=True)] for s in here[1:]
        ]
        lines.append([f"{row['shape']}, {row['precision']}", *(f"{s['us'] / 1e3:.2f}" if s else "" for s in here)])
        lines[-1] += [f"{statistics.median(r):.2f}x" if r else "" for r in ratios]
        lines[-1] += [f"{s['extra_mb']:.0f}" if s and s["extra_mb"] is not None else "" for s in here]
    header = ["whole step", *(f"{side}, ms" for side in sides), *(f"{side} / {sides[0]}" for side in sides[1:])]
    return markdown_table([*header, *(f"{side}, MB" for side in sides)], lines) if lines else ""


def traffic_table(directory: Path) -> str:
    """GB per step of each version, and the part of V1's that the newest one has left."""
    lines = []
    for row in read_rows(directory / "traffic.json"):
        counted = [value for value in row.values() if not isinstance(value, str)]
        cells = [*(f"{gb:.2f}" for gb in counted), *[""] * (4 - len(counted))]
        lines.append([f"{row['shape']}, {row['precision']}", *cells, f"{100 * counted[-1] / counted[0]:.0f} %"])
    header = ["GB read and written per step", "V1", "V2", "V3", "V4", "newest of V1"]
    return markdown_table(header, lines) if lines else ""


def table(directory: Path) -> str:
    """The tables of one device as Markdown."""
    tables = [*(sides_table(directory, study) for study in STUDIES), rows_table(directory)]
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
    precisions = args.precisions or (["bf16"] if args.what in STEPS else list(PRECISIONS))
    if args.what == "rows":
        measured = rows(args.rounds, args.rows)
    elif args.tried:
        measured = with_blocks(args.what, args.rounds, precisions, args.tried)
    else:
        measured = (STUDIES | STEPS)[args.what](args.rounds, precisions)
    name = f"{args.what}_blocks" if args.tried else args.what
    measure_study(args.directory / f"{name}.json", measured, rounds=args.rounds)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add("what", choices=(*STUDIES, "rows", *STEPS, "table"))
    add("directory", type=Path)
    add("--rounds", type=at_least(1), default=15, metavar="N", help="turns of each side (default: 15)")
    add("--precisions", nargs="+", choices=PRECISIONS, help="(default: all; bf16 for step and llama)")
    add("--rows", type=at_least(512), default=65536, metavar="N", help="of the study of that name (default: 65536)")
    add(
        "--try", nargs="+", default=[], dest="tried", metavar="BLOCKS", help="as --blocks of the script; many in quotes"
    )
    args = parser.parse_args(argv)
    return run_tool(PROG, lambda: run_study(args))


if __name__ == "__main__":
    sys.exit(main())
