#!/usr/bin/env python3
"""Inference with a transformer layer as one launch, compared with other ways to run it.

One program per multiprocessor, so that all of them run at the same time, goes through the phases
of the layer:
  1  norm, query, key and value projection, rotary embedding      x        -> qkv
  2  causal attention                                             qkv      -> attended
  3  output projection, residual addition                         attended -> summed
  4  norm, gate and up projection, SwiGLU                         summed   -> active
  5  down projection, residual addition                           active   -> out
In a phase the programs share out tiles of its result, and before the next they wait for each
other. What a phase leaves to the next is small enough to stay in the L2 cache.

Takes the arguments of tiny_llama_v4.py.

Example:
  python exercises/tiny_llama_v4/one_launch.py --use-amp --batch-size 1
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np

import tiny_llama_v4 as v4  # before Triton: without a GPU it asks for the interpreter
from fusion_lab.accuracy import InFloat64
from tiny_llama_v4 import BACKEND, LOG2E, Tensor, nn, tl, torch, triton, wrap_triton

# As V4's: of the GEMMs, then of the attention.
NAMES = (
    *("BLOCK_M", "BLOCK_N", "BLOCK_K"),
    *("BLOCK_QUERY", "BLOCK_KEY", "num_warps", "num_stages"),
)
BLOCKS = {
    "cuda": (16, 64, 128, 16, 64, 4, 3),
    # 16 bits, with more rows than a tile of the above on each multiprocessor
    "cuda many rows": (64, 128, 64, 64, 64, 8, 3),
    "cuda float32": (16, 32, 32, 16, 32, 4, 2),
    "hip": (16, 32, 64, 16, 32, 4, 2),
    "hip float32": (16, 32, 32, 16, 16, 4, 2),
}


@triton.jit
def grid_barrier(COUNTER, THREADS: tl.constexpr):
    """Wait until every program of the grid has come here; all see what one has stored before.

    A release publishes stores, an acquire drops what caches hold. On NVIDIA one of THREADS does it
    for the program; on AMD, where no thread waits for the stores of other waves, all do. The
    counter only goes up: each multiple of what the grid adds opens one barrier.
    """
    arrivals = tl.num_programs(0) * THREADS
    counter = COUNTER + tl.zeros([THREADS], tl.int32)
    tl.debug_barrier()  # every thread has stored
    ticket = tl.max(tl.atomic_add(counter, 1, sem="release", scope="gpu"))
    opens = (ticket // arrivals + 1) * arrivals
    while tl.min(tl.atomic_add(counter, 0, sem="acquire", scope="gpu")) < opens:
        pass
    tl.debug_barrier()  # none loads before


@triton.jit
def load_tile(X, row, rows, column, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Load X[row, column], with rows STRIDE apart and zeros beyond its rows and COLUMNS."""
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = X + row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(X, tile, row, rows, column, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Store X[row, column] = tile, with rows STRIDE apart, within its rows and COLUMNS."""
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = X + row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    tl.store(at, tile, mask=inside)


@triton.jit
def norm_gemm(
    X, NORM, WEIGHT, row, rows, feature, FEATURES: tl.constexpr, APART: tl.constexpr,
    C: tl.constexpr, eps: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return norm(x) W^T in these rows, for these features and for those APART from them.

        norm(x) W^T = rstd * ((x * NORM) W^T)

    A row's rstd scales its products as well as its elements, so the one loop over channels finds
    both. X [rows, C], NORM [C], WEIGHT (W) [FEATURES, C].
    """
    squares = tl.zeros([row.shape[0], BLOCK_K], tl.float32)
    first = tl.zeros([row.shape[0], feature.shape[0]], tl.float32)
    second = tl.zeros([row.shape[0], feature.shape[0]], tl.float32)
    for start in range(0, C, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        x = load_tile(X, row, rows, channel, C, C).to(tl.float32)
        squares += x * x
        norm = tl.load(NORM + channel, mask=channel < C, other=0.0).to(tl.float32)
        x = (x * norm[None, :]).to(WEIGHT.dtype.element_ty)
        weight = load_tile(WEIGHT, feature, FEATURES, channel, C, C)
        first = tl.dot(x, tl.trans(weight), first, input_precision=PRECISION)
        weight = load_tile(WEIGHT, feature + APART, FEATURES, channel, C, C)
        second = tl.dot(x, tl.trans(weight), second, input_precision=PRECISION)
    rstd = 1 / tl.sqrt(tl.sum(squares, 1) / C + eps)[:, None]
    return first * rstd, second * rstd


@triton.jit
def gemm_residual_tile(
    A, WEIGHT, RESIDUAL, OUT, row, rows, column, C: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store a tile of OUT = A W^T + RESIDUAL.

    A [rows, C], WEIGHT (W) [COLUMNS, C], RESIDUAL, OUT [rows, COLUMNS].
    """
    out = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in range(0, C, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        a = load_tile(A, row, rows, channel, C, C)
        weight = load_tile(WEIGHT, column, COLUMNS, channel, C, C)
        out = tl.dot(a, tl.trans(weight), out, input_precision=PRECISION)
    out += load_tile(RESIDUAL, row, rows, column, COLUMNS, COLUMNS).to(tl.float32)
    store_tile(OUT, out, row, rows, column, COLUMNS, COLUMNS)


@triton.jit
def attention_tile(
    QKV, OUT, batch, head, first, seq, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the causal attention of one head for the queries from `first` on, BLOCK_M of them.

    As attention_forward_kernel, but without the sums, which only a backward pass needs.
    """
    TOKEN: tl.constexpr = (H + 2 * K) * D  # elements of a token in QKV
    VALUE: tl.constexpr = K * D  # from a key head to its value head
    channel, token = tl.arange(0, BLOCK_D), batch * seq + first + tl.arange(0, BLOCK_M)
    end = (batch + 1) * seq
    q = load_tile(QKV + head * D, token, end, channel, D, TOKEN)
    KEYS = QKV + (H + head // (H // K)) * D
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, seq), BLOCK_N):
        key = batch * seq + start + tl.arange(0, BLOCK_N)
        k = load_tile(KEYS, key, end, channel, D, TOKEN)
        v = load_tile(KEYS + VALUE, key, end, channel, D, TOKEN)
        # S = Q K^T
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (D**-0.5 * LOG2E)
        scores = tl.where(token[:, None] >= key[None, :], scores, float("-inf"))
        # online softmax
        new_row_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_row_max[:, None])
        rescale = tl.exp2(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        # O += P V
        out = tl.dot(p.to(v.dtype), v, out * rescale[:, None], input_precision=PRECISION)
        row_max = new_row_max
    store_tile(OUT + head * D, out / row_sum[:, None], token, end, channel, D, H * D)


@triton.jit(do_not_specialize=["batches", "seq"])
def transformer_block_kernel(
    X, NORM_1, QKV_WEIGHT, O_WEIGHT, NORM_2, GATE_UP_WEIGHT, DOWN_WEIGHT, COS, SIN,
    QKV, ATTENDED, ACTIVE, SUMMED, OUT, COUNTER, batches, seq, eps: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, THREADS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_QUERY: tl.constexpr, BLOCK_KEY: tl.constexpr,
):  # fmt: skip
    """Compute phases FIRST to LAST of a layer, see above.

        x = x + attention(rotary(norm_1(x) Wqkv^T)) Wo^T
        out = x + (silu(norm_2(x) Wgate^T) * (norm_2(x) Wup^T)) Wdown^T

    X, SUMMED, OUT [B S, H D], weights [out, in], those of query, key and value and those of gate
    and up packed. In a phase program p owns the tiles p, p + programs, ... of its result: of a GEMM
    BLOCK_M x BLOCK_N, which it sums over BLOCK_K channels at a time, of the attention BLOCK_QUERY
    queries of a head, which go through BLOCK_KEY keys at a time.
    """
    C: tl.constexpr = H * D
    HALF: tl.constexpr = D // 2
    PACKED: tl.constexpr = (H + 2 * K) * D
    UP: tl.constexpr = INNER  # from a gate to its up
    rows = batches * seq
    row_tiles = tl.cdiv(rows, BLOCK_M)
    for PHASE in tl.static_range(FIRST, LAST + 1):
        if PHASE > FIRST:
            grid_barrier(COUNTER, THREADS)
        if PHASE == 1:
            tiles = row_tiles * tl.cdiv(PACKED // 2, BLOCK_N)
        elif PHASE == 2:
            tiles = tl.cdiv(seq, BLOCK_QUERY) * batches * H
        elif PHASE == 4:
            tiles = row_tiles * tl.cdiv(INNER, BLOCK_N)
        else:
            tiles = row_tiles * tl.cdiv(C, BLOCK_N)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            row = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
            column = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
            if PHASE == 1:  # a column is a channel of a head's first half, and that HALF from it
                feature = column // HALF * D + column % HALF
                first, second = norm_gemm(
                    X, NORM_1, QKV_WEIGHT, row, rows, feature, PACKED, HALF, C, eps, PRECISION,
                    BLOCK_K,
                )  # fmt: skip
                rotates = (column // HALF < H + K)[None, :]  # a value head's angle is 0
                cos = load_tile(COS, row % seq, seq, column % HALF, HALF, D).to(tl.float32)
                cos = tl.where(rotates, cos, 1.0)
                sin = load_tile(SIN, row % seq, seq, column % HALF, HALF, D).to(tl.float32)
                sin = tl.where(rotates, sin, 0.0)
                rotated = first * cos - second * sin
                store_tile(QKV, rotated, row, rows, feature, PACKED, PACKED)
                rotated = second * cos + first * sin
                store_tile(QKV, rotated, row, rows, feature + HALF, PACKED, PACKED)
            elif PHASE == 2:
                # those with the most keys start first
                start = (tiles - 1 - tile) // (batches * H) * BLOCK_QUERY
                attention_tile(
                    QKV, ATTENDED, tile // H % batches, tile % H, start, seq, H, K, D, BLOCK_D,
                    PRECISION, BLOCK_QUERY, BLOCK_KEY,
                )  # fmt: skip
            elif PHASE == 3:
                gemm_residual_tile(
                    ATTENDED, O_WEIGHT, X, SUMMED, row, rows, column, C, C, PRECISION, BLOCK_K
                )  # fmt: skip
            elif PHASE == 4:
                gate, up = norm_gemm(
                    SUMMED, NORM_2, GATE_UP_WEIGHT, row, rows, column, 2 * INNER, UP, C, eps,
                    PRECISION, BLOCK_K,
                )  # fmt: skip
                active = gate * tl.sigmoid(gate) * up
                store_tile(ACTIVE, active, row, rows, column, INNER, INNER)
            else:
                gemm_residual_tile(
                    ACTIVE, DOWN_WEIGHT, SUMMED, OUT, row, rows, column, INNER, C, PRECISION,
                    BLOCK_K,
                )  # fmt: skip


TOO_OLD = ""  # why a layer cannot be one launch
if not v4.INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    needed = "Triton 3.3 (PyTorch 2.7) for a cooperative launch"
    TOO_OLD = f"a layer as one launch needs {needed}, not {triton.__version__}"


def transformer_block(
    x: Tensor, input_norm: Tensor, qkv: Tensor, o: Tensor, post_attention_norm: Tensor,
    gate_up: Tensor, down: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int,
    eps: float, launches: int = 1,
) -> Tensor:  # fmt: skip
    """Return the residual stream x [B, S, D] after the layer with these weights.

    One launch, or 5: one for each phase. Programs of one launch wait for each other, so it is
    cooperative: all run at the same time, or it is an error.
    """
    if (seq := x.shape[1]) > len(cos):
        raise ValueError(f"sequences of {seq} tokens, but the model's seq_len is {len(cos)}")
    if launches == 1 and TOO_OLD:
        raise RuntimeError(TOO_OLD)
    (batch, seq, width), (packed, inner), dtype = x.shape, (len(qkv), down.shape[1]), qkv.dtype
    x, dim, kind = x.contiguous(), width // num_heads, "hip" if BACKEND == "hip" else "cuda"
    if dtype == torch.float32:
        kind += " float32"
    elif kind == "cuda" and batch * seq > 256:
        kind += " many rows"
    chosen = dict(zip(NAMES, BLOCKS[kind], strict=True))
    if BACKEND == "cuda":
        chosen["maxnreg"] = 255  # the only program on its multiprocessor
    if launches == 1 and BACKEND != "interpreter":
        chosen["launch_cooperative_grid"] = True
    packed_heads, attended, active = (
        x.new_empty(batch * seq, channels, dtype=dtype) for channels in (packed, width, inner)
    )
    summed = torch.empty_like(x, dtype=torch.float32)
    out, counter = torch.empty_like(x), x.new_zeros(1, dtype=torch.int32)
    # In the interpreter programs run one after the other, so in one launch there is one, which
    # waits for no other.
    programs = launches
    if x.is_cuda:
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    threads = 64 * chosen["num_warps"] if BACKEND == "hip" else 1
    phases = [(1, 5)] if launches == 1 else [(phase, phase) for phase in range(1, 6)]
    for first, last in phases:
        wrap_triton(transformer_block_kernel)[(programs,)](
            *(x, input_norm, qkv, o, post_attention_norm, gate_up, down, cos, sin, packed_heads),
            *(attended, active, summed, out, counter),
            batches=batch, seq=seq, eps=eps, H=num_heads, K=num_kv_heads, D=dim, INNER=inner,
            FIRST=first, LAST=last, THREADS=threads, PRECISION=v4.dot_precision(dtype),
            BLOCK_D=max(16, triton.next_power_of_2(dim)), **chosen,
        )  # fmt: skip
    return out


def first_layer(
    module: ModuleType, args: argparse.Namespace, dtype: torch.dtype, **changes
) -> nn.Module:
    """Build the first layer of a version, the weights of its GEMMs in this type, for inference."""
    args = argparse.Namespace(**{**vars(args), **changes})
    layer = module.build_model(args, torch.device(args.device)).layers[0].requires_grad_(False)
    for part in layer.modules():
        if isinstance(part, nn.Linear):  # in training the optimizer or autocast does that
            part.weight.data = part.weight.data.to(dtype)
    return layer


def in_launches(launches: int, layer: nn.Module, x: Tensor) -> Tensor:
    """Return the residual stream x [B, S, D] after this layer of V4, in 1 launch or 5.

    The layer's projections must be packed.
    """
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm,)
    norms += (layer.post_attention_layernorm,)
    projections = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    qkv, o, gate_up, down = (projection.weight for projection in projections)
    weights = norms[0].weight, qkv, o, norms[1].weight, gate_up, down
    angles, heads = (attention.rotary.cos, attention.rotary.sin), attention.num_heads
    settings = heads, attention.num_kv_heads, norms[0].eps, launches
    return transformer_block(x, *weights, *angles, *settings)


def benchmark(args: argparse.Namespace) -> int:
    """Run the first layer as one launch and in other ways, and check that they agree.

    On a GPU each is timed. The result is also in <profile-dir>/tiny_llama_v4_benchmark.json.
    """
    import tiny_llama_v2 as v2

    if TOO_OLD:
        v4.fail(TOO_OLD, 4)
    device, dtype = v4.prepare(args), torch.float32
    if args.use_amp:
        dtype = getattr(torch, args.amp_dtype)
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(args.batch_size, args.seq_len, args.hidden_dim, generator=generator).to(device)
    fused = first_layer(v4, args, dtype, triton_attention=True, triton_swiglu=True)  # packed
    v2_fusions = {"qkv_fusion": True, "flash_attention": True, "swiglu_fusion": True}
    library = first_layer(v2, args, dtype, **v2_fusions)

    def whole(layer: nn.Module, *update: None) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=args.use_amp):
            result = layer(x, *update)
        return torch.add(*result) if update else result

    sides = {
        "one launch": partial(in_launches, 1, fused, x),
        "five launches": partial(in_launches, 5, fused, x),
        "kernels of training": partial(whole, fused, None),
    }
    if device.type == "cuda":
        sides["torch.compile"] = torch.compile(partial(whole, library))
    with torch.no_grad():
        with InFloat64():
            layer = first_layer(v2, args, torch.float64, **v2_fusions).double()
            exact = layer(x.double()) - x
        results = {**{name: side() for name, side in sides.items()}, "library": whole(library)}
        errors = {
            name: float((result - x - exact).norm() / exact.norm())
            for name, result in results.items()
        }
        # three times what rounding does to PyTorch's own operators
        limit = max(1e-4, 3 * errors.pop("library"))
        times = in_turns(sides) if device.type == "cuda" else {}
    print(f"One layer, batch_size {args.batch_size}, seq_len {args.seq_len}, {str(dtype)[6:]}")
    for name, error in errors.items():
        taken = f"{times[name]['us']:8.1f} us {times[name]['kernels']:4} kernels" if times else ""
        print(f"{name:22}{taken}  relative error {error:.1e}, limit {limit:.1e}")
    if not times:
        print("Not timed: the kernels run in Triton's interpreter.")
    passed = all(error <= limit for error in errors.values())  # a NaN fails
    print(f"Accuracy check: {'PASS' if passed else 'FAIL'}")
    content = {
        "args": {**vars(args), "profile_dir": None},
        "environment": v4.environment(device),
        "errors": errors,
        "times": times,
    }
    path = args.profile_dir / "tiny_llama_v4_benchmark.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
    return 0 if passed else 1


def in_turns(
    sides: dict[str, Callable[[], Tensor]], rounds: int = 11, calls: int = 20
) -> dict[str, dict]:  # fmt: skip
    """Measure microseconds per call, the median of turns of one graph each, and count kernels."""
    graphs, turns, times = {}, {name: [] for name in sides}, {}
    for name, side in sides.items():
        side()
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            for _ in range(calls):
                side()
        graphs[name] = graph
        graph.replay()
    for turn in range(rounds):
        for name in list(sides) if turn % 2 == 0 else reversed(sides):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            turns[name].append(1e3 * begin.elapsed_time(end) / calls)
    on_gpu, activity = torch.autograd.DeviceType.CUDA, torch.profiler.ProfilerActivity.CUDA
    for name, side in sides.items():
        with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
            side()
            torch.cuda.synchronize()
        kernels = sum(event.device_type == on_gpu for event in profile.events())
        us = float(np.median(turns[name]))
        times[name] = {"us": us, "turns_us": turns[name], "kernels": kernels}
    return times


if __name__ == "__main__":
    sys.exit(benchmark(v4.parse_args()))
