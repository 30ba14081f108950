"""The operators of a training step: the memory that each reads and writes, the line that calls it.

What an operator does is told by PyTorch's own schemas and tags, by its category in
fusion_lab/profile/kernels.py, and by the few lists here. What none of these knows is `unknown`,
and is never fused.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from fusion_lab.files import ROOT
from fusion_lab.fusions.call import Call
from fusion_lab.fusions.flops import flop_of, type_of
from fusion_lab.profile.kernels import category
from fusion_lab.profile.laws import access_of
from fusion_lab.profile.traffic import OVERWRITING, bytes_behind

NO_WORK = ("empty", "new_empty", "lift_fresh")
RANDOM = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")  # nor do these read it
# The first tensor must lie in memory, as any element of it may be wanted: some, or all
GATHERS = re.compile("embedding|index|_unsafe_index|index_select|gather|take")
WINDOWS = re.compile(  # their gradients are scatters
    r"(_?adaptive_)?(max|avg)_pool\dd(_with_indices)?|im2col|upsample_\w+|grid_sampler_\dd"
    r"|(reflection|replication)_pad\dd|searchsorted|bucketize"
)
SCATTERS = re.compile(  # complete when the last source has been added
    r"(index_(add|put|copy)|_unsafe_index_put|_index_put_impl|scatter(_add|_reduce)?)_?|col2im"
    r"|embedding_dense_backward"
)
SCANS = re.compile("cum(sum|prod|max|min)|logcumsumexp|sort|topk")  # inductor leaves most
MOVES = re.compile(  # what comes out is elsewhere than what went in
    r"constant_pad_nd|(slice|select)_(backward|scatter)|roll|flip|cat|stack|repeat|pixel_(un)?shuffle"
)
STREAMS = re.compile(  # element by element, or a loss of elements
    r"native_dropout|(nll|mse|huber|smooth_l1)_loss\w*|binary_cross_entropy\w*|rand\w*"
    r"|bernoulli|normal|uniform|exponential|(hardswish|log_sigmoid|glu|_prelu_kernel)(_forward)?"
    r"|leaky_relu|celu|selu|rrelu_with_noise|(hard|soft)shrink|mish|hardsigmoid|logit"
    r"|polar|complex|arange|linspace|eye|scalar_tensor|diagonal_backward|lift_fresh_copy"
    r"|pixel_(un)?shuffle|floor_divide"
)
OURS = (ROOT / "fusion_lab", ROOT / "analysis_tools", Path(sysconfig.get_path("scripts")))
OWN = tuple(f"{folder}{os.sep}" for folder in OURS)  # the last has the command find-fusions
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
OPTIM = f"{TORCH}optim{os.sep}"
SECTOR = 32  # bytes that a GPU reads at least
# Of these PyTorch runs other operators backward as soon as a mode, such as a recorder, looks on.
OTHERWISE = {"CumprodBackward0": "cumprod", "ProdBackward0": "prod", "ProdBackward1": "prod"}
COUNTING = ("_local_scalar_dense", "add_", "_foreach_add_")
ON_HOST = ("_get_value", "_single_tensor_", "_multi_tensor_")  # functions of torch.optim
KERNELS = ("triton.runtime", "KernelInterface", "__getitem__")
GRAPHS = ("torch._inductor.output_code", "CompiledFxGraph", "__call__")
COMPILED = "compiled code"  # the name of what torch.compile has made of a part of the step


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
    # elements, length, and whether columns, of what it adds up
    sums: tuple[int, int, bool] | None = None
    closed: bool = False  # its results are complete when its last block has ended
    source: set = field(default_factory=set)  # keys that must lie in memory before
    operands: list[tuple] = field(default_factory=list)  # both of a product: key, shape, strides
    access: str = "straight"  # to memory: or strided, or sums
    groups: int = 1  # of a convolution
    random: bool = False  # a second time it would make other numbers
    alone: bool = False  # long sums of columns are a kernel of their own
    apart: bool = False  # what it adds up lies in many pieces
    meets: bool = False  # it adds at indices, many to each place
    barrier: bool = False  # the host waits for its result, or nobody sees what it does
    dtype: str = ""  # in which a product is computed
    flop: int = 0
    lacks: str = ""  # what is not known of it
    moved: int = 0  # bytes, read and written; like kernels and time of the first pass alone
    kernels: int = 1
    queued: int = 1  # of its kernels, those that ran one after the other
    us: float | None = None  # of its kernels, where they were timed
    turned: float = 0.0  # of these in kernels that only turn a picture
    biased: float = 0.0  # and in those that add the bias to it


@dataclass
class Recorded:
    """What a step did: its operators, and the storages that they name by number."""

    operators: list[Operator] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of each storage
    alive: set[tuple[int, int]] = field(default_factory=set)  # there when the step is over
    unwritten: list[str] = field(default_factory=list)  # operators that read what none wrote
    run: str = "fake"  # or "real" on a CPU, or "measured" on a GPU
    launched: dict[str, float] = field(default_factory=dict)  # microseconds by name of the kernel
    call: int = 0  # which call of the step it was
    remarks: list[str] = field(default_factory=list)

    def flop(self) -> Counter:
        """FLOPs by the type of the products."""
        by_type: Counter = Counter()
        for operator in self.operators:
            by_type[operator.dtype] += operator.flop
        return +by_type


# --- which line


@cache
def whose(path: str) -> str:
    """The path of the user's code as a reader wants it; "" of a file that no user looks into."""
    packages = re.search(r"(?:site|dist)-packages/(.*)", path)
    of_others = path.startswith((TORCH, *OWN, "<")) or "/torchinductor_" in path
    if of_others or (packages and packages[1].startswith("einops/")):
        return ""
    if packages:
        return packages[1]
    if path.startswith(sysconfig.get_paths()["stdlib"]):
        return ""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def counts_steps(name: str, tensors: Sequence[Tensor]) -> bool:
    """Does an optimizer of PyTorch count its steps, or read the number? That is no kernel: without
    `capturable` and `fused` the number is on the host."""
    if name not in COUNTING or any(t.dim() or not t.is_cpu for t in tensors):
        return False
    frame = sys._getframe(2)
    while frame and not frame.f_code.co_filename.startswith(OPTIM):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name.startswith(ON_HOST)


# --- what runs


class Recorder(TorchDispatchMode):
    """Records the operators inside, and keeps no tensor alive.

    With `timed` each call is a range of the profiler, `#` and its number.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What torch.compile has made runs as it is, see `seen_kernels`."""
        return True

    def __init__(self, timed: bool = False):
        super().__init__()
        self.timed = timed
        self.calls = 0
        self.inside = False
        self.recorded = Recorded()
        self.operators = self.recorded.operators
        self.sizes = self.recorded.sizes
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.version: list[int] = []
        self.blank: set[int] = set()  # storages that no operator has written
        self.lines: dict[tuple[int, int], str] = {}  # by thread and number of the autograd node
        self.main = threading.get_ident()
        self.otherwise: set[tuple[str, str]] = set()  # operators and lines, see OTHERWISE
        self.optimizing = 0  # steps of optimizers that are being taken, one in another
        self.stepped: set[int] = set()  # optimizers that took a step, by id

    # --- which memory

    def number(self, tensor: Tensor) -> int:
        """The number of a storage; the weak reference keeps its address from being used again."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = StorageWeakRef(storage), len(self.sizes)
            self.add(storage.nbytes())
        return self.storages[storage._cdata][1]

    def knows(self, tensor: Tensor) -> bool:
        """Has an operator touched the storage of this tensor?"""
        return tensor.untyped_storage()._cdata in self.storages

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

    def __enter__(self) -> Recorder:
        self.outer = seen_kernels(self)
        self.outer.callback(register_optimizer_step_pre_hook(self.begin_step).remove)
        self.outer.callback(register_optimizer_step_post_hook(self.end_step).remove)
        return super().__enter__()

    def begin_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """An optimizer begins a step. What its closure runs is no part of it."""
        self.stepped.add(id(optimizer))
        self.optimizing += 1
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return args, kwargs

        def outside() -> object:
            steps = self.optimizing
            self.optimizing = 0
            loss = closure()
            self.optimizing = steps
            return loss

        if len(args) > 1:
            return (optimizer, outside, *args[2:]), kwargs
        return args, {**kwargs, "closure": outside}

    def end_step(self, *_: object) -> None:
        self.optimizing -= 1

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.outer.close()
        storages = self.storages.values()
        self.recorded.alive = {(n, self.version[n]) for ref, n in storages if not ref.expired()}
        self.recorded.remarks += [
            f"the backward pass of {name} at {line} runs other operators while it is looked at:"
            " what it moves and launches otherwise is missing in the totals"
            for name, line in sorted(self.otherwise)
        ]

    def place(self) -> tuple[str, str]:
        """Phase and line of what runs now: the innermost line outside of PyTorch. In the backward
        pass it is that of the forward pass, unless code of the user runs in it: that of a custom
        Function, or once more that of a checkpoint."""
        line = ""
        frame = sys._getframe(2)
        while frame and frame.f_code.co_name != "_engine_run_backward":
            path = whose(frame.f_code.co_filename)
            if path and not line:
                line = f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        thread = threading.get_ident()
        if line and (node is None or thread != self.main or frame):
            sequence = torch.autograd._get_sequence_nr() - 1  # of the node around this operator
            self.lines.setdefault((thread, sequence), line)
        elif node is not None:
            number = node._sequence_nr()
            thread = thread if frame else self.main
            while number >= 0 and (thread, number) not in self.lines and number < 2**62:
                number -= 1  # an in-place operator on a view has a second node
            line = self.lines.get((thread, number), "")
        if node is not None and node.name() in OTHERWISE:
            self.otherwise.add((OTHERWISE[node.name()], line))
        phase = "optimizer" if self.optimizing else "forward"
        phase = "backward" if node is not None else phase
        return phase, line or "?"

    # --- the operators

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # of which tensors it is made, it says itself
        if getattr(function, "namespace", "") in ("prim", "profiler"):
            return function(*args, **kwargs)
        if is_composite(function):  # inference mode leaves it to us to take it apart
            super().__enter__()  # the parts come here, too; our own hooks are there already
            try:
                return function.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        name = getattr(function, "overloadpacket", function).__name__
        return self.call(name, function, args, kwargs)

    def call(
        self,
        name: str,
        function: Callable,
        args: Sequence,
        kwargs: dict,
        written: Sequence[Tensor] = (),
        lacks: str = "",
    ) -> object:
        """Run an operator, and record what it is; of what is none, what it writes and lacks."""
        place = self.place()
        number = self.calls
        within = self.inside
        self.calls += 1
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if counts_steps(name, tensors):
            return function(*args, **kwargs)
        dense = [t for t in tensors if is_dense(t)]
        before = [self.use(t) for t in dense]
        self.inside = True
        try:
            with torch.profiler.record_function(f"#{number}") if self.timed else nullcontext():
                result = function(*args, **kwargs)
        finally:
            self.inside = within
        if getattr(function, "is_view", False):
            return result
        operator = Operator(name, number, *place, list(dict.fromkeys(before)), [], lacks=lacks)
        call = Call(function, name, args, kwargs, dense, result, written)
        if len(dense) < len(tensors) or not all(map(is_dense, call.outputs)):
            operator.barrier = True  # sparse, or another kind whose memory is not one piece
            operator.lacks = "bytes and FLOPs"
            self.operators.append(operator)
            return result
        passes = self.describe(operator, call)
        access = "sums" if any(each.sums for each in passes) else access_of(dense + call.outputs)
        for each in passes:
            each.access = access
        if passes and (not lacks or name == COMPILED):
            passes[0].moved = sum(u.bytes for u in (*operator.reads, *operator.writes))
        for each in passes if within else ():
            each.kind = "library"  # of compiled code
        self.operators += passes
        return result

    def describe(self, operator: Operator, call: Call) -> list[Operator]:
        """What a call does, as one or more passes over its data; none for a view, or a question."""
        name = call.name
        inputs = call.inputs
        known = {self.number(t) for t in inputs}
        call.fresh = [t for t in call.outputs if self.number(t) not in known]
        changes = call.written and torch.Tag.inplace_view not in call.tags
        waits = torch.Tag.data_dependent_output in call.tags
        if not (call.fresh or changes or waits):
            return []
        if name.startswith(NO_WORK):
            self.blank |= {self.number(t) for t in call.fresh if "empty" in name}
            return []
        self.touch(operator, call)
        flop, missing = flop_of(call)
        if flop is not None or missing:
            operator.flop = flop or 0
            operator.dtype = type_of(name, (call.outputs or inputs)[0].dtype)
        if call.is_own:
            operator.lacks = operator.lacks or missing or ("FLOPs" if flop is None else "")
            return [operator]
        operator.lacks = missing
        kind = category(f"aten::{name}")
        window = bool(WINDOWS.fullmatch(name.removesuffix("_backward")))
        backward = name.endswith("_backward")
        if waits or call.has_dynamic_shape:
            operator.kind = "library"
            operator.barrier = True
        elif operator.dtype:
            self.multiply(operator, call)
        elif is_left_alone(call, window, kind):
            operator.kind = "library"
        elif kind == "normalisation" or "softmax" in name:
            return self.passes(operator, call.args, inputs, call.outputs)
        elif GATHERS.fullmatch(name):
            self.gather(operator, call)
        elif window and not backward:
            operator.kind = "stream"
            operator.source = {operator.reads[0].key}
        elif window or SCATTERS.fullmatch(name):
            self.scatter(operator, call)
        elif category(f"aten::{call.plain}") == "reductions":
            operator.kind = "stream"
            operator.alone = True
            dim = [*call.args[2 if "norm" in name else 1 :], call.kwargs.get("dim")][0]
            operator.sums = reduced(inputs[0], None if call.plain != name else dim)
        elif call.is_pointwise or kind in ("element-wise", "copies") or streams(call.plain):
            self.stream(operator, call)
        else:
            operator.lacks = operator.lacks or "FLOPs, and bytes beside those of its tensors"
        return [operator]

    def touch(self, operator: Operator, call: Call) -> None:
        """What an operator reads and writes, if it reads and writes its tensors as a whole."""
        name = call.name
        reads = operator.reads
        written = [*call.written]
        if name.startswith((*OVERWRITING, *RANDOM)) or "out" in call.kwargs:
            blind = [self.use(t) for t in written]
            rest = [use._replace(bytes=0) for use in blind if use.bytes < self.sizes[use.key[0]]]
            reads[:] = [use for use in reads if use not in blind] + rest
        blank = any(use.key[0] in self.blank and use.bytes for use in reads)
        if blank and not call.is_own and not SCATTERS.fullmatch(name):
            self.recorded.unwritten.append(f"{name} at {operator.line}")
        if call.named.get("training"):  # a batch norm changes these without a word in its schema
            averages = [call.named.get("running_mean"), call.named.get("running_var")]
        else:
            averages = []
        changed = [*written, *call.fresh, *(t for t in averages if t is not None)]
        operator.writes = [self.use(t, write=True) for t in changed]
        operator.numel = max((t.numel() for t in [*call.inputs, *call.outputs]), default=0)

    def multiply(self, operator: Operator, call: Call) -> None:
        """A product of matrices, or a convolution."""
        name = call.name
        operator.kind = "matrix"
        if name in ("mm", "addmm", "bmm", "baddbmm") or "conv" in name or "scaled_dot" in name:
            both = [t for t in call.args if isinstance(t, Tensor)]
            both = both[-2:] if "mm" in name else both[name.endswith("backward") :][:2]
            operator.operands = [(self.use(t).key, (*t.shape,), t.stride()) for t in both]
            operator.groups = call.named.get("groups", 1)

    def gather(self, operator: Operator, call: Call) -> None:
        """Some of the first tensor is read, in rows of a sector at least."""
        first = call.inputs[0]
        source = operator.reads[0].key
        row = (first.shape[-1] if first.dim() > 1 else 1) * first.element_size()
        wanted = sum(w.bytes for w in operator.writes) * max(1, SECTOR // max(1, row))
        operator.kind = "stream"
        operator.source = {source}
        operator.reads[0] = Use(source, -1 - operator.call, wanted)
        operator.numel = max(t.numel() for t in call.outputs)

    def scatter(self, operator: Operator, call: Call) -> None:
        """Something is put, or added, at indices."""
        name = call.name
        written = call.written
        target = operator.writes[0]
        operator.kind = "stream"
        operator.closed = True
        added = max(t.numel() for t in call.inputs[bool(written) :])
        adds = "add" in name or "backward" in name or bool(call.named.get("accumulate"))
        operator.meets = adds and added >= sum(t.numel() for t in [*written, *call.fresh])
        added *= call.inputs[0].element_size()
        if written:  # only what is added to is touched, and its reads meet its writes
            source = operator.reads[0]
            operator.reads[0] = source._replace(bytes=0)
            operator.source = {source.key}
        whole = 0 if written else target.bytes
        operator.writes[0] = Use(target.key, -1 - operator.call, whole + added)

    def stream(self, operator: Operator, call: Call) -> None:
        """It goes element by element, or adds up a loss of elements."""
        name = call.name
        reads = operator.reads
        first = next(iter(call.inputs), None)
        operator.kind = "stream"
        operator.random = torch.Tag.nondeterministic_seeded in call.tags
        if "_loss" in name and call.outputs[0].numel() < first.numel():
            operator.sums = (first.numel(), first.numel(), False)
        if name == "nll_loss_forward":  # one element of each row
            operator.sums = None
            operator.closed = True
            reads[0] = reads[0]._replace(bytes=SECTOR * call.inputs[1].numel())
        elif name == "nll_loss_backward":  # of the logarithms only the shape
            reads[1] = reads[1]._replace(bytes=0)

    def passes(self, operator: Operator, args, inputs, outputs) -> list[Operator]:
        """A norm or a softmax: sums, then each element, then the gradients of weights.

        One kernel does the first two if a block has the whole of what is summed.
        """
        name = operator.name
        x = inputs[0]
        backward = "backward" in name
        operator.apart = "batch" in name and x.dim() in (3, 5)
        if "softmax" in name:
            sums = reduced(x, next(a for a in args if isinstance(a, int)))
        else:  # one sum for each mean or deviation, which are the second result
            means = next((t.numel() for t in (inputs[2:] if backward else outputs[1:])), 0)
            length = x.numel() // (means or x.shape[1])
            columns = "batch" in name and x.dim() == 2
            summed = inputs[1] if backward else x
            operator.apart |= "layer" in name and summed.stride(-1) > 1
            sums = x.numel(), max(1, length), columns
        between = self.add(8 * max(1, x.numel() // max(1, sums[1])))
        first, *rest = operator.writes
        alone = backward and rest and "batch" not in name  # whose gradients are the same sums
        writes = [between, *([] if alone else rest)]
        one = replace(operator, kind="stream", numel=x.numel(), writes=writes, sums=sums)
        reads = [*operator.reads, between]
        two = replace(one, reads=reads, writes=[first], sums=None, kernels=0)
        if not alone:
            return [one, two]
        weights = x.numel(), max(1, x.numel() * x.element_size() // max(1, rest[0].bytes)), True
        more = {"sums": weights, "closed": True, "alone": True, "kernels": 1}
        three = replace(two, reads=operator.reads, writes=rest, **more)
        three.moved = sum(use.bytes for use in (*three.reads, *rest))
        return [one, two, three]


def patched(method: tuple[str, str, str], make: Callable) -> AbstractContextManager:
    """While it lasts a method of a class, by module, class and name, is what `make` does with it as
    its first argument; nothing where the package is not installed."""
    module, owner, name = method
    try:
        owner = getattr(importlib.import_module(module), owner)
    except ImportError:
        return nullcontext()
    old = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **named: make(old, *args, **named))


def seen_kernels(recorder: Recorder) -> ExitStack:
    """What launches kernels without an operator is recorded like one: code that torch.compile has
    made, whose products are operators inside, and Triton kernels, which may write what they get."""

    def run(old: Callable, graph: object, inputs: list) -> object:
        written = [inputs[i] for i in graph.mutated_input_idxs]
        lacks = "kernels, bytes and FLOPs inside"
        arguments = [*inputs]
        inputs.clear()  # it frees what it has used
        return recorder.call(COMPILED, lambda *x: old(graph, [*x]), arguments, {}, written, lacks)

    def choose(old: Callable, kernel: object, grid: object) -> Callable:
        launch = old(kernel, grid)
        name = f"Triton kernel {kernel.fn.__name__}"

        def alone(*args, **kwargs) -> object:
            with _disable_current_modes():  # no operator of Triton's interpreter is recorded
                return launch(*args, **kwargs)

        def launched(*args, **kwargs) -> object:
            if recorder.inside:  # of an operator
                return launch(*args, **kwargs)
            written = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            return recorder.call(name, alone, args, kwargs, written, "bytes and FLOPs")

        return launched

    stack = ExitStack()
    stack.enter_context(patched(GRAPHS, run))
    stack.enter_context(patched(KERNELS, choose))
    return stack


def is_dense(tensor: Tensor) -> bool:
    """Is its memory one piece?"""
    return tensor.layout == torch.strided and not tensor.is_nested


@cache
def is_composite(function: Callable) -> bool:
    """Is it made of other operators, as it has no kernels of its own?"""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    keys = torch._C.DispatchKey
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own = any(has(function.name(), key) for key in (keys.CPU, keys.CUDA))
    return not own and has(function.name(), keys.CompositeImplicitAutograd)


def is_left_alone(call: Call, window: bool, kind: str) -> bool:
    """Does a compiler leave a call as it is?"""
    name = call.name
    return bool(
        (kind == "optimizer" and call.plain == name)
        or SCANS.fullmatch(name)
        or (name == "index_add" and call.inputs[0].dtype == torch.bfloat16)
        or (name.startswith(("index_put", "_index_put")) and call.has_mask)
        or (window and left_alone(name))
    )


@cache
def left_alone(name: str) -> bool:
    """Does a compiled step call PyTorch's own kernel for it, as inductor's tables say?"""
    from torch._inductor import decomposition, lowering  # some seconds

    packet = getattr(torch.ops.aten, name)
    forms = {packet, *(getattr(packet, overload) for overload in packet.overloads())}
    return bool(forms & lowering.fallbacks) and not forms & {*decomposition.decompositions}


@cache
def streams(name: str) -> bool:
    """Does it go element by element, as its name or that of its forward operator says? PyTorch tags
    only some gradients."""
    plain = name.removesuffix("_").removesuffix("_backward")
    forward = getattr(torch.ops.aten, plain, None)
    tags = [getattr(forward, overload).tags for overload in forward.overloads()] if forward else []
    return bool(STREAMS.fullmatch(plain)) or any(torch.Tag.pointwise in each for each in tags)


def reduced(x: Tensor, dim: object) -> tuple[int, int, bool]:
    """Elements of a reduction over these dimensions, all unless given; how many of them make one
    result; and whether it goes along columns: the innermost dimension stays."""
    dims = [dim] if isinstance(dim, int) else dim
    if not isinstance(dims, (list, tuple)) or not dims:
        dims = range(x.dim())
    dims = {d % max(1, x.dim()) for d in dims}
    wide = [d for d in range(x.dim()) if x.shape[d] > 1]
    length = math.prod(x.shape[d] for d in dims)
    return x.numel(), max(1, length), bool(wide) and min(wide, key=x.stride) not in dims
