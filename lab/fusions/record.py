"""The operators of a training step: the memory that each reads and writes, the line that calls it.

What an operator does is told by PyTorch's own tags, by its category in lab/profile/kernels.py, and
by the few lists here. What none of these knows is `unknown`, and is never fused.
"""

from __future__ import annotations

import math
import re
import sys
import sysconfig
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.files import ROOT
from lab.profile.kernels import category
from lab.profile.roofline import flop_counter
from lab.profile.traffic import OVERWRITING, bytes_behind

NO_WORK = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh", "_record_function")
RANDOM = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")  # nor do these read it
PRODUCTS = re.compile("conv|scaled_dot|lstm|gru|rnn")
# The first tensor must lie in memory, as any element of it may be wanted: some, or all
GATHERS = re.compile("embedding|index|_unsafe_index|index_select|gather|take")
WINDOWS = re.compile(
    r"(max|avg)_pool\dd(_with_indices)?|im2col|upsample_\w+(?<!backward)|grid_sampler_\dd"
    r"|(reflection|replication)_pad\dd|searchsorted|bucketize"
)
SCATTERS = re.compile(  # complete when the last source has been added
    r"(index_(add|put|copy)|_unsafe_index_put|_index_put_impl|scatter(_add|_reduce)?)_?|col2im"
    r"|embedding_dense_backward|(max|avg)_pool\dd(_with_indices)?_backward|upsample_\w+_backward"
    r"|(reflection|replication)_pad\dd_backward"
)
MOVES = re.compile(  # what comes out is elsewhere than what went in
    r"constant_pad_nd|(slice|select)_(backward|scatter)|roll|flip|cat|stack|repeat|pixel_(un)?shuffle"
)
STREAMS = re.compile(  # element by element, or a loss of elements
    r"native_dropout|(nll|mse|huber|smooth_l1)_loss\w*|binary_cross_entropy\w*|rand\w*"
    r"|bernoulli|normal|uniform|exponential|(hardswish|log_sigmoid|glu|_prelu_kernel)(_forward)?"
    r"|polar|complex|arange|linspace|eye|scalar_tensor|diagonal_backward|lift_fresh_copy"
    r"|pixel_(un)?shuffle"
)
OWN = tuple(str(ROOT / folder) for folder in ("lab", "analysis_tools"))
SECTOR = 32  # bytes that a GPU reads at least
# With fewer sums than these a GPU computes long ones in several blocks: two for each of its 132
# multiprocessors, of a row or of 32 columns
FEW, LONG = {False: 264, True: 8448}, {False: 8192, True: 64}


class Use(NamedTuple):
    """Bytes of a storage, in the version that in-place operators before have left."""

    key: tuple[int, int]  # storage, version
    offset: int  # below 0 of what a gather or scatter touches, in no order
    bytes: int

    @property
    def old(self) -> tuple[int, int]:
        """What was there before a write."""
        return self.key[0], self.key[1] - 1


@dataclass
class Operator:
    """One call of an operator, or one of the passes over its data that it cannot do without."""

    name: str
    call: int  # its number; two passes have the same
    phase: str  # forward, backward, optimizer
    line: str
    reads: list[Use]
    writes: list[Use]
    numel: int = 0  # elements that it goes over
    kind: str = "unknown"  # stream, matrix, library (left as it is)
    # elements, length, and whether columns, of sums that the same kernel can use
    reduced: tuple[int, int, bool] | None = None
    closed: bool = False  # its results are complete when its last block has ended
    source: set = field(default_factory=set)  # keys that must lie in memory before
    operands: list[tuple] = field(default_factory=list)  # both of a product: key, shape, strides
    sums: bool = False  # it adds up
    random: bool = False  # a second time it would make other numbers
    apart: bool = False  # sums of columns, which compilers leave to a kernel of its own
    barrier: bool = False  # the host waits for its result, or nobody sees what it does
    segment: int = 0  # between barriers; a phase that comes again is another
    dtype: str = ""
    flop: int = 0
    moved: int = 0  # bytes, read and written; like kernels and time of the first pass alone
    kernels: int = 1
    us: float | None = None


@cache
def whose(path: str) -> str:
    """The path of the user's code as a reader wants it; "" of a file that no user looks into, and
    "optimizer"."""
    packages = re.search(r"(?:site|dist)-packages/(.*)", path)
    if path.startswith(str(Path(torch.__file__).parent)):
        return "optimizer" if "/torch/optim/" in path else ""
    own = path.startswith((*OWN, "<")) or "/einops/" in path
    if own or (path.startswith(sysconfig.get_paths()["stdlib"]) and not packages):
        return ""
    here = Path(path).is_relative_to(Path.cwd())
    return packages[1] if packages else str(Path(path).relative_to(Path.cwd())) if here else path


class Recorder(TorchDispatchMode):
    """Records the operators inside, and keeps no tensor alive.

    With `timed` each call is a range of the profiler, `#` and its number.
    """

    supports_higher_order_operators = True

    def __init__(self, timed: bool = False):
        super().__init__()
        self.timed, self.calls = timed, 0
        self.operators: list[Operator] = []
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.sizes: list[int] = []  # bytes, by number of the storage
        self.version: list[int] = []
        self.blank: set[int] = set()  # storages that no operator has written
        self.lines: dict[tuple[int, int], str] = {}  # by thread and number of the autograd node
        self.main = threading.get_ident()
        self.flops = flop_counter().flop_registry
        self.unwritten: list[str] = []  # operators that read what no operator wrote
        self.alive: set[tuple[int, int]] = set()  # what is there when the step is over
        self.weights: set[int] = set()  # their storages

    # --- which memory

    def number(self, tensor: Tensor) -> int:
        """The number of a storage; the weak reference keeps its address from being used again."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = StorageWeakRef(storage), len(self.sizes)
            self.add(storage.nbytes())
        return self.storages[storage._cdata][1]

    def add(self, size: int) -> Use:
        """A storage of its own, also for what no tensor is."""
        self.sizes.append(size)
        self.version.append(0)
        return Use((len(self.sizes) - 1, 0), 0, size)

    def use(self, tensor: Tensor, write: bool = False) -> Use:
        number = self.number(tensor)
        if write:
            self.version[number] += 1
            self.blank.discard(number)
        offset = tensor.storage_offset() * tensor.element_size()
        size = min(bytes_behind(tensor), self.sizes[number])  # of views whose rows overlap
        return Use((number, self.version[number]), offset, size)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        found = self.storages.values()
        self.alive = {(n, self.version[n]) for reference, n in found if not reference.expired()}

    # --- which line

    def place(self) -> tuple[str, str]:
        """Phase and line of what runs now: the innermost line outside of PyTorch. In the backward
        pass it is that of the forward pass, unless code of the user runs in it: that of a custom
        Function, or once more that of a checkpoint."""
        line, optimizer, frame = "", False, sys._getframe(2)
        while frame and frame.f_code.co_name != "_engine_run_backward":
            path = whose(frame.f_code.co_filename)
            optimizer |= path == "optimizer"
            if path not in ("", "optimizer") and not line:
                line = f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        node, thread = torch._C._current_autograd_node(), threading.get_ident()
        if line and (node is None or thread != self.main or frame):
            made = torch.autograd._get_sequence_nr() - 1  # of the node around this operator
            self.lines.setdefault((thread, made), line)
        elif node is not None:
            number, thread = node._sequence_nr(), thread if frame else self.main
            while number >= 0 and (thread, number) not in self.lines and number < 2**62:
                number -= 1  # an in-place operator on a view has a second node
            line = self.lines.get((thread, number), "")
        phase = "backward" if node is not None else "optimizer" if optimizer else "forward"
        return phase, line or "?"

    # --- the operators

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "namespace", "") == "prim":  # what a tensor says of itself
            return function(*args, **kwargs)
        place, call = self.place(), self.calls
        self.calls += 1
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        dense = [t for t in tensors if t.layout == torch.strided and not t.is_nested]
        before = [self.use(t) for t in dense]
        with torch.profiler.record_function(f"#{call}") if self.timed else nullcontext():
            result = function(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        name = getattr(function, "overloadpacket", function).__name__
        operator = Operator(name, call, *place, list(dict.fromkeys(before)), [])
        if len(dense) < len(tensors) or any(t.layout != torch.strided or t.is_nested for t in made):
            operator.barrier = True  # sparse, or another kind whose memory is not one piece
            self.operators.append(operator)
        else:
            found = self.describe(function, operator, args, kwargs, dense, made, result)
            for whole in found[:1]:
                whole.moved = sum(use.bytes for use in (*operator.reads, *operator.writes))
            self.operators += found
        return result

    def describe(self, function, operator, args, kwargs, inputs, made, result) -> list[Operator]:
        """What a call does, as one or more passes over its data; none for a view."""
        name, reads, tags = operator.name, operator.reads, getattr(function, "tags", ())
        arguments = getattr(getattr(function, "_schema", None), "arguments", ())
        given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(arguments)]
        pairs = zip(arguments, given, strict=True)
        written = [t for a, value in pairs if a.is_write for t in tree_leaves(value)]
        written = [t for t in written if isinstance(t, Tensor)]
        known = {self.number(t) for t in inputs}
        fresh = [t for t in made if self.number(t) not in known]
        if made and not fresh and (not written or torch.Tag.inplace_view in tags):
            return []
        if name.startswith(NO_WORK):
            self.blank |= {self.number(t) for t in fresh if "empty" in name}
            return []
        if name.startswith((*OVERWRITING, *RANDOM)) or "out" in kwargs:
            blind = [self.use(t) for t in written]
            rest = [use._replace(bytes=0) for use in blind if use.bytes < self.sizes[use.key[0]]]
            reads[:] = [use for use in reads if use not in blind] + rest
        own = getattr(function, "namespace", "") != "aten"
        if not own and any(u.key[0] in self.blank and u.bytes for u in reads):
            self.unwritten.append(f"{name} at {operator.line}")
        operator.writes = [self.use(t, write=True) for t in [*written, *fresh]]
        operator.numel = max((t.numel() for t in [*inputs, *made]), default=0)
        operator.dtype = str(made[0].dtype) if made else ""
        if own:
            return [operator]
        formula, kind = self.flops.get(function.overloadpacket), category(f"aten::{name}")
        operator.flop = formula(*args, **kwargs, out_val=result) if formula else 0
        first = inputs[0] if inputs else None
        masks = any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:])
        dynamic = torch.Tag.dynamic_output_shape in tags and (name != "index" or masks)
        if torch.Tag.data_dependent_output in tags or dynamic:
            operator.kind, operator.barrier = "library", True
        elif formula or PRODUCTS.search(name) or kind == "GEMM":
            operator.kind = "matrix"
            if name in ("mm", "addmm"):
                both = [t for t in args if isinstance(t, Tensor)][-2:]
                operator.operands = [(self.use(t).key, t.shape, t.stride()) for t in both]
        elif "optimizer" in (kind, operator.phase) or name in ("sort", "topk"):
            operator.kind = "library"
        elif kind == "normalisation" or "softmax" in name:
            return self.passes(operator, args, inputs, made)
        elif GATHERS.fullmatch(name):
            row = (first.shape[-1] if first.dim() > 1 else 1) * first.element_size()
            wanted = sum(w.bytes for w in operator.writes) * max(1, SECTOR // row)
            operator.kind, operator.source = "stream", {reads[0].key}
            reads[0] = Use(reads[0].key, -1 - operator.call, wanted)
            operator.numel = max(t.numel() for t in made)
        elif WINDOWS.fullmatch(name):
            operator.kind, operator.source = "stream", {reads[0].key}
        elif SCATTERS.fullmatch(name):
            operator.kind, operator.closed = "stream", True
            target = operator.writes[0]
            added = max(t.numel() for t in inputs[bool(written) :]) * inputs[0].element_size()
            if written:  # only what is added to is touched, and its reads meet its writes
                reads[0], operator.source = reads[0]._replace(bytes=0), {reads[0].key}
            whole = 0 if written else target.bytes
            operator.writes[0] = Use(target.key, -1 - operator.call, whole + added)
        elif kind == "reductions":
            operator.kind = "stream"
            dim = [*args[2 if "norm" in name else 1 :], kwargs.get("dim")][0]
            operator.apart = sums(operator, first.numel(), *reduced(first, dim))
        elif torch.Tag.pointwise in tags or kind in ("element-wise", "copies") or streams(name):
            operator.kind = "stream"
            operator.random = torch.Tag.nondeterministic_seeded in tags
            operator.closed = "_loss" in name and made[0].numel() < first.numel()
            if name == "nll_loss_forward":  # one element of each row
                reads[0] = reads[0]._replace(bytes=SECTOR * inputs[1].numel())
            elif name == "nll_loss_backward":  # of the logarithms only the shape
                reads[1] = reads[1]._replace(bytes=0)
        return [operator]

    def passes(self, operator: Operator, args, inputs, made) -> list[Operator]:
        """A norm or a softmax: sums, then each element, then the gradients of weights.

        One kernel does the first two if a block has the whole of what is summed.
        """
        name, x = operator.name, inputs[0]
        backward = "backward" in name
        if "softmax" in name:
            length, columns = reduced(x, next(a for a in args if isinstance(a, int)))
        else:  # one sum for each mean or deviation, which are the second result
            means = next((t.numel() for t in (inputs[2:] if backward else made[1:])), 0)
            length, columns = x.numel() // (means or x.shape[1]), "batch" in name and x.dim() == 2
        between = self.add(8 * max(1, x.numel() // max(1, length)))
        first, *rest = operator.writes
        one = replace(operator, kind="stream", writes=[between, *([] if backward else rest)])
        sums(one, x.numel(), max(1, length), columns)
        reads = [*operator.reads, between]
        none = {"reduced": None, "closed": False, "sums": False, "kernels": 0}
        two = replace(one, reads=reads, writes=[first], **none)
        if not (backward and rest):
            return [one, two]
        return [one, two, replace(two, reads=operator.reads, writes=rest, closed=True, sums=True)]


def streams(name: str) -> bool:
    """Does it go element by element, as its name or that of its forward operator says? PyTorch tags
    only some gradients."""
    plain = name.removesuffix("_").removesuffix("_backward")
    forward = getattr(torch.ops.aten, plain, None)
    tags = [getattr(forward, overload).tags for overload in forward.overloads()] if forward else []
    return bool(STREAMS.fullmatch(plain)) or any(torch.Tag.pointwise in found for found in tags)


def reduced(x: Tensor, dim: object) -> tuple[int, bool]:
    """The length of a reduction over these dimensions, all unless given, and whether it goes along
    columns: the innermost dimension stays."""
    dims = [dim] if isinstance(dim, int) else dim
    if not isinstance(dims, (list, tuple)) or not dims:
        dims = range(x.dim())
    dims = {d % max(1, x.dim()) for d in dims}
    wide = [d for d in range(x.dim()) if x.shape[d] > 1]
    length = math.prod(x.shape[d] for d in dims)
    return max(1, length), bool(wide) and min(wide, key=x.stride) not in dims


def sums(operator: Operator, numel: int, length: int, columns: bool) -> bool:
    """Note sums of so many elements each: few long ones are complete when the kernel has ended. Are
    they such, of columns?"""
    operator.numel, operator.sums = numel, True
    operator.closed = numel // length < FEW[columns] and length > LONG[columns]
    operator.reduced = None if operator.closed or length == 1 else (numel, length, columns)
    return operator.closed and columns
