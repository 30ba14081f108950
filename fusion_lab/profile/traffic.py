"""Bytes that operators read and write: each reads its tensors from device memory and writes its
results there, once. In a version's script each launch of a kernel is one, in place of the operator
that it belongs to, whose kernels pass on more than its results."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn
from torch.library import CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

OPTIMIZER = "optimizer"  # stands for PyTorch's, beside names of operators
OVERWRITING = ("copy_", "fill_", "zero_")  # these do not read the tensor that they write
ONLY_WRITTEN = ("out", "casts")  # arguments of our own operators
UPDATED = ("WEIGHTS", "AVERAGES", "SQUARES", "TOTAL")  # tensors that a kernel reads and writes
# Kernels that touch a part of a tensor only. Of q, k and v with H query and K key heads; of the
# packed q, k, v and gate.
PARTS = {
    ("attention_backward_queries_kernel", "GRAD_QKV"): lambda H, K, **rest: H / (H + 2 * K),
    ("attention_backward_keys_kernel", "GRAD_QKV"): lambda H, K, **rest: 2 * K / (H + 2 * K),
    ("attention_backward_query_kernel", "GRAD_QKVG"): lambda **rest: 1 / 2,
    ("attention_backward_key_kernel", "GRAD_QKVG"): lambda **rest: 1 / 2,
    ("attention_backward_key_kernel", "QKVG"): lambda **rest: 3 / 4,
    ("attention_backward_bias_kernel", "QKVG"): lambda **rest: 3 / 4,
}
# these read only some of their first tensor
LOOKUPS = ("embedding", "index", "index_select", "gather")


def bytes_behind(tensor: Tensor) -> int:
    """Count the bytes of memory behind a tensor; what is expanded (stride 0) is there once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write: `bytes_of` by qualified name of the modules
    with a row, without inner ones, and `by_operator` (`aten::mm`)."""

    def __init__(self, model: nn.Module, kinds: dict[str, str], no_work: tuple[str, ...]):
        super().__init__()
        self.kinds, self.no_work, self.root = kinds, no_work, type(model).__name__
        self.tracker = ModuleTracker()
        self.bytes_of: Counter = Counter()
        self.by_operator: Counter = Counter()
        self.script = sys.modules.get(type(model).__module__)
        self.outer = contextlib.ExitStack()

    def __enter__(self) -> Traffic:
        self.outer.enter_context(self.tracker)
        if launcher := getattr(self.script, "wrap_triton", None):

            def launch(kernel: Callable, grid: tuple, arguments: dict) -> None:
                self.launched(kernel.__name__, arguments)
                launcher(kernel)[grid](**arguments)

            counted = {"wrap_triton": lambda kernel: Launching(kernel, launch)}
            for name, value in vars(self.script).items():
                if isinstance(value, CustomOpDef):
                    counted[name] = value._init_fn
            self.outer.enter_context(mock.patch.multiple(self.script, **counted))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.outer.close()

    def count(self, name: str, moved: int) -> None:
        """Count bytes for an operator or kernel, and for the module that runs now."""
        self.bytes_of[self.innermost()] += moved
        self.by_operator[name] += moved

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.count(function._schema.name, self.moved(function, args, kwargs, result))
        return result

    def launched(self, kernel: str, arguments: dict) -> None:
        """Count a launch: each tensor once, or its part; twice what the kernel reads and writes."""
        once: dict[int, int] = {}
        again = 0
        for name, tensor in arguments.items():
            if not isinstance(tensor, Tensor):
                continue
            share = PARTS.get((kernel, name))
            whole = bytes_behind(tensor)
            once[id(tensor)] = round(whole * share(**arguments)) if share else whole
            if name in UPDATED:
                again += whole
        self.count(kernel, sum(once.values()) + again)

    def innermost(self) -> str:
        """The innermost module with a row that is running now."""
        running = (name.removeprefix(self.root).removeprefix(".") for name in self.tracker.parents)
        return max((name for name in running if name in self.kinds), key=len, default="")

    def moved(self, function, args: tuple, kwargs: dict, result: object) -> int:
        """Bytes that one operator reads and writes."""
        name = function.overloadpacket.__name__
        # the core leaves out the same when it counts
        if function.is_view or name.startswith(self.no_work):
            return 0
        given = args, {key: value for key, value in kwargs.items() if key not in ONLY_WRITTEN}
        inputs, outputs = (
            [x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in (given, result)
        )
        # an operator of ours that writes into its arguments
        if not outputs and function.namespace != "aten":
            pairs = zip(function._schema.arguments, args, strict=False)
            named = [(argument, x) for argument, x in pairs if isinstance(x, Tensor)]
            outputs = [x for argument, x in named if argument.is_write]
            inputs = [x for argument, x in named if argument.name not in ONLY_WRITTEN]
        if not outputs:  # such as the choice among the kernels of fused attention
            return 0
        read, written = 0, sum(map(bytes_behind, outputs))
        if name in OVERWRITING:
            inputs = inputs[1:]
        elif name in LOOKUPS:
            read, inputs = min(bytes_behind(inputs[0]), written), inputs[1:]
        elif name.startswith("nll_loss"):  # a label picks one score of its row; a gradient none
            backward = name.endswith("backward")
            scores = inputs.pop(int(backward))
            read = 0 if backward else inputs[0].numel() * scores.element_size()
        different = {(leaf.data_ptr(), tuple(leaf.shape), leaf.stride()): leaf for leaf in inputs}
        return read + written + sum(bytes_behind(leaf) for leaf in different.values())


def bytes_of_a_step(trainer, no_work: tuple[str, ...]) -> Counter:
    """Return the bytes that the operators of one training step read and write, by operator.

    PyTorch's optimizer has no result to count: it reads weights, gradients and two moments, and
    writes all but the gradients. It is called OPTIMIZER.
    """
    batch = trainer.next_batch()
    with Traffic(trainer.model, {}, no_work) as traffic:
        trainer.compute(batch)
    if isinstance(trainer.optimizer, torch.optim.AdamW):
        weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
        traffic.by_operator[OPTIMIZER] += 7 * weights
    return traffic.by_operator


class Launching:
    """Stands for a wrapped kernel: `Launching(kernel, seen)[grid](TENSOR, ..., NAME=value)` calls
    `seen` with kernel, grid and arguments by name."""

    def __init__(self, kernel: Callable, seen: Callable[[Callable, tuple, dict], None]):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*pointers: Tensor | None, **arguments) -> None:
            arguments |= zip(self.kernel.arg_names, pointers, strict=False)
            self.seen(self.kernel, grid, arguments)

        return launch
