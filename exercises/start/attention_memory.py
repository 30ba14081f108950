#!/usr/bin/env python3
"""Memory that attention takes on this machine, forward and backward: with its matrix of scores in
memory, and fused.

Measured with the memory events of the PyTorch profiler, on the CPU, for several lengths; then
drawn.

Examples:
  python exercises/start/attention_memory.py --plot attention_memory.png
  python exercises/start/attention_memory.py --lengths 256 4096     predict the two numbers first
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

# otherwise the profiler writes lines of its own on stderr
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_lab.cli import at_least, documented_parser, run_tool
from fusion_lab.files import write_file, write_text
from fusion_lab.show import Column, drawing, render

PROG = Path(__file__).name
COLUMNS = [
    Column("tokens", lambda row: str(row["length"])),
    Column("scores in memory, MB", lambda row: row["scores"] / 1e6, ".1f"),
    Column("fused, MB", lambda row: row["fused"] / 1e6, ".1f"),
    Column("ratio", lambda row: row["scores"] / row["fused"], ".0f", "x"),
]
HEADS, HEAD_DIM = 8, 16


def with_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [heads, S, head_dim], its scores [heads, S, S] in memory."""
    scores = q @ k.mT / math.sqrt(HEAD_DIM)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by PyTorch's fused kernel."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def peak_bytes(attention: Callable[[Tensor, Tensor, Tensor], Tensor], length: int) -> int:
    """High-water mark of what a forward and a backward pass allocate, inputs not counted."""
    q, k, v = (torch.randn(HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        attention(q, k, v).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(accumulate(change for _, change in changes))


def draw(path: Path, rows: Sequence[dict]) -> None:
    """Both curves as a picture."""
    pyplot = drawing()
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    lengths = [row["length"] for row in rows]
    for name, label, style in (("scores", "scores in memory", "o-"), ("fused", "fused", "s-")):
        axes.plot(lengths, [row[name] / 1e6 for row in rows], style, label=label)
    axes.set(
        xlabel="tokens", ylabel="MB", ylim=(0, None), xticks=lengths, title="Memory of attention"
    )
    axes.legend()
    write_file(path, figure.savefig)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add(
        "--lengths",
        type=at_least(1),
        nargs="+",
        default=[256, 512, 1024, 2048],
        metavar="S",
        help="tokens",
    )
    add("--plot", type=Path, metavar="FILE.png", help="draw the curves")
    add("--output", type=Path, metavar="FILE.json", help="keep what was measured")
    args = parser.parse_args(argv)

    def body() -> int:
        rows = []
        for length in sorted(args.lengths):
            print(f"measuring {length} tokens", file=sys.stderr, flush=True)
            scores, memory = peak_bytes(with_scores, length), peak_bytes(fused, length)
            rows.append({"length": length, "scores": scores, "fused": memory})
        print(render(COLUMNS, rows))
        if args.output:
            config = {"heads": HEADS, "head_dim": HEAD_DIM, "torch": torch.__version__}
            write_text(args.output, json.dumps({"config": config, "rows": rows}, indent=1) + "\n")
        if args.plot:
            draw(args.plot, rows)
            print(f"drawn: {args.plot}")
        return 0

    return run_tool(PROG, body)


if __name__ == "__main__":
    sys.exit(main())
