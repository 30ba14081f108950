"""On a GPU torch.compile sees every Triton kernel, forward and backward, in a single graph.

Traced here without one: Triton is told of an H100 and asked for no machine code, and nothing is
executed. The process is one of its own, because kernels are either interpreted or compiled in all
of a process.
"""

import pytest
from conftest import ROOT, TINY, finished, model_of

PROGRAM = """
import importlib, sys
from types import SimpleNamespace
from unittest import mock
import torch, triton
from torch._dynamo.backends.common import aot_autograd
from triton.backends.compiler import GPUTarget

h100 = GPUTarget("cuda", 90, 32)
driver = SimpleNamespace(get_current_target=lambda: h100, get_current_device=lambda: 0)
triton.runtime.driver.set_active(driver)
sys.path.insert(0, sys.argv[1])
module = importlib.import_module(sys.argv[2])
module.BACKEND = "cuda"

def traced(graph, inputs):
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    names = ("triton_kernel_wrapper", module.SCRIPT)
    print(*(sum(name in call for call in calls) for name in names))
    nodes = graph.graph.output_node().args[0]
    results = [node.meta["val"] if node is not None else None for node in nodes]
    zeros = lambda r: torch.zeros(r.shape, dtype=r.dtype) if isinstance(r, torch.Tensor) else r
    run = lambda args: list(map(zeros, results))
    run._boxed_call = True
    return run

with mock.patch("torch.cuda.is_available", lambda: True):
    args = module.parse_args(["--device", "auto", *sys.argv[3:]])
model = module.build_model(args, torch.device("cpu"))
batch = module.make_batches(args, torch.device("cpu"), 1).next_batch()
compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=traced))
with torch.autocast("cpu", torch.bfloat16, enabled=args.use_amp):
    compiled(**batch).backward()
"""


@pytest.mark.parametrize(
    ("script", "argv", "launches"),
    [
        # A layer: 5 forward and 6 backward, and 2; sums for 3 norms.
        ("tiny_llama_v3", "--num-layers 1 --matmul-precision high", [7, 11]),
        pytest.param("tiny_openfold_v3", "--use-amp", [19, 78], marks=pytest.mark.slow),
    ],
)
def test_torch_compile_sees_every_kernel_in_one_graph(script: str, argv: str, launches: list[int]):
    argv = [script, *TINY[model_of(script)], *argv.split()]
    done = finished("-B", "-c", PROGRAM, ROOT, *argv, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    counts = [f"{count} 0" for count in launches]
    assert done.stdout.split("\n")[:-1] == counts, "kernels, and operators left opaque"
