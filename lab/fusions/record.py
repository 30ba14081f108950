"""The operators of a training step: what each one reads and writes, and which line of the user's
code it comes from."""

from __future__ import annotations

import math
import sys
import sysconfig
import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.profile.roofline import flop_counter
from lab.profile.traffic import bytes_behind

NO_WORK = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "detach")
OVERWRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_")
OVERWRITE += ("random_", "out")  # these do not read what they write
# Element by element, beside those that PyTorch itself marks so
STREAM = set(
    "_to_copy copy copy_ cat stack fill fill_ zero_ zeros zeros_like new_zeros ones ones_like"
    " new_ones full full_like new_full arange linspace eye scalar_tensor native_dropout bernoulli"
    " bernoulli_ rand rand_like randn randn_like randint normal_ uniform_ exponential_ random_ triu"
    " tril constant_pad_nd slice_backward select_backward slice_scatter select_scatter roll flip"
    " repeat glu glu_backward leaky_relu_backward hardswish_backward mish_backward elu_backward"
    " softplus_backward log_sigmoid_forward log_sigmoid_backward hardtanh_backward"
    " smooth_l1_loss smooth_l1_loss_backward mse_loss mse_loss_backward huber_loss"
    " huber_loss_backward binary_cross_entropy binary_cross_entropy_backward polar complex"
    " binary_cross_entropy_with_logits _prelu_kernel _prelu_kernel_backward nll_loss_backward"
    " nll_loss2d_backward diagonal_backward lift_fresh_copy _conj_physical bucketize"
    " searchsorted".split()
)
REDUCE = set(
    "sum mean amax amin max min prod var std var_mean std_mean any all argmax argmin logsumexp norm"
    " linalg_vector_norm count_nonzero cumsum cumprod".split()
)
SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}
PRODUCTS = ("conv", "scaled_dot", "lstm", "gru", "rnn", "addmv", "mv", "dot")
NORMS = {"layer_norm", "group_norm", "batch_norm", "rms_norm"}
# The first tensor must be in memory, as any element may be wanted; what is found can go on
GATHER = set(
    "embedding index index_select gather take max_pool2d_with_indices avg_pool2d im2col roll"
    " upsample_nearest2d upsample_bilinear2d grid_sampler_2d nll_loss_forward nll_loss2d_forward"
    " reflection_pad2d _unsafe_index".split()
)
# The result is complete when the last source has been added
SCATTER = set(
    "index_add index_add_ index_put index_put_ _index_put_impl_ _unsafe_index_put scatter scatter_"
    " scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_copy index_copy_ col2im"
    " embedding_dense_backward max_pool2d_with_indices_backward avg_pool2d_backward"
    " upsample_nearest2d_backward upsample_bilinear2d_backward".split()
)
# What comes out is elsewhere than what went in
MOVES = set(
    "constant_pad_nd slice_backward select_backward slice_scatter roll flip cat stack repeat".split()
)
SECTOR = 32  # bytes that a GPU reads at least
# With fewer results than these a GPU sums each one in several blocks: twice its 132
# multiprocessors, in rows; and 32 columns to a block
FEW_ROWS, FEW_COLUMNS, LONG_ROW, LONG_COLUMN = 264, 8448, 8192, 64


class Use(NamedTuple):
    """Bytes of a storage, in the version that in-place operators before have left."""

    key: tuple[int, int]  # storage, version
    offset: int
    bytes: int


@dataclass
class Operator:
    """One call of an operator, or one of the passes over its data that it cannot do without."""

    name: str
    kind: str  # matrix, stream, library (left as it is), unknown
    phase: str  # forward, backward, optimizer
    line: str
    reads: list[Use]
    writes: list[Use]
    numel: int  # elements that it goes over
    # elements, length and whether these are columns, of sums whose results the same kernel can use
    reduced: tuple[int, int, bool] | None = None
    closed: bool = False  # its results are complete when the last block has ended
    source: set = field(default_factory=set)  # keys that must be in memory before it begins
    barrier: bool = False  # the host waits for its result, or nobody sees what happens here
    kernels: int = 1
    flop: int = 0
    us: float | None = None
    dtype: str = ""


@cache
def kind_of_file(path: str) -> str:
    """Whose a file of Python code is: the user's, or whose that no user looks into."""
    torch_folder = str(Path(torch.__file__).parent)
    if path.startswith(torch_folder):
        return "optimizer" if "/optim/" in path else "torch"
    packages = "site-packages" in path or "dist-packages" in path
    library = path.startswith(sysconfig.get_paths()["stdlib"]) and not packages
    own = path.startswith(str(Path(__file__).parent)) or "/einops/" in path
    return "library" if library or own or path.startswith("<") else "user"


def shown(path: str) -> str:
    """A path as a reader wants it: from here, or from where packages are."""
    _, found, inside = path.rpartition("-packages/")
    here = Path(path)
    if not found and here.is_relative_to(Path.cwd()):
        inside = str(here.relative_to(Path.cwd()))
    return inside or path


def user_line(frame: FrameType | None) -> tuple[str | None, bool, bool]:
    """The innermost line outside of PyTorch, whether an optimizer runs, and whether a backward pass
    was begun below."""
    line, optimizer = None, False
    while frame:
        code = frame.f_code
        kind = kind_of_file(code.co_filename)
        if code.co_name == "_engine_run_backward":
            return line, optimizer, True
        optimizer |= kind == "optimizer"
        if kind == "user" and line is None:
            line = f"{shown(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return line, optimizer, False


class Recorder(TorchDispatchMode):
    """Records the operators inside, and keeps no tensor alive.

    With `timed` each one is a range of the profiler, `#` and its number in `self.ranges`.
    """

    supports_higher_order_operators = True

    def __init__(self, timed: bool = False):
        super().__init__()
        self.operators: list[Operator] = []
        self.parts: list[range] = []  # of each range of the profiler
        self.timed = timed
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.sizes: list[int] = []
        self.version: list[int] = []
        self.unwritten: set[int] = set()  # made empty, and written by nobody that was seen
        self.lines: dict[int, dict[int, str]] = {}  # thread, number of the autograd node
        self.main = threading.get_ident()
        self.registry = flop_counter().flop_registry
        self.notes: set[str] = set()

    # --- which memory

    def number(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage; the weak reference keeps its address from being used again."""
        address = storage._cdata
        if address not in self.storages:
            self.storages[address] = StorageWeakRef(storage), len(self.sizes)
            self.sizes.append(storage.nbytes())
            self.version.append(0)
        return self.storages[address][1]

    def use(self, tensor: torch.Tensor) -> Use:
        number = self.number(tensor.untyped_storage())
        offset = tensor.storage_offset() * tensor.element_size()
        return Use((number, self.version[number]), offset, bytes_behind(tensor))

    def alive(self) -> set[tuple[int, int]]:
        """What is there now, in its newest version."""
        found = self.storages.values()
        return {(n, self.version[n]) for reference, n in found if not reference.expired()}

    # --- which line

    def place(self) -> tuple[str, str]:
        """Phase and line of what runs now. In the backward pass it is the line of the forward pass,
        unless the code of the line itself runs there: a checkpoint, or a custom Function."""
        line, optimizer, nested = user_line(sys._getframe(2))
        thread, node = threading.get_ident(), torch._C._current_autograd_node()
        if node is None:
            line = line or "?"
            made = torch.autograd._get_sequence_nr() - 1
            self.lines.setdefault(thread, {}).setdefault(made, line)
            return "optimizer" if optimizer else "forward", line
        if line is None or (thread == self.main and not nested):
            lines = self.lines.get(thread if nested else self.main, {})
            number = node._sequence_nr()
            if number not in lines:  # such as of an in-place operator on a view
                before = sorted(lines)
                at = bisect_right(before, number)
                number = before[at - 1] if at and number < 2**62 else None
            line = lines.get(number)
        else:
            made = torch.autograd._get_sequence_nr() - 1
            self.lines.setdefault(thread, {}).setdefault(made, line)
        return "backward", line or "?"

    # --- the operators

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "namespace", "") == "prim":  # what a tensor says of itself
            return function(*args, **kwargs)
        phase, line = self.place()
        number = len(self.parts)
        inside = torch.profiler.record_function(f"#{number}") if self.timed else nullcontext()
        known = isinstance(function, torch._ops.OpOverload)
        name = function.overloadpacket.__name__ if known else function.name()
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = [(t, self.use(t)) for t in tensors if t.layout == torch.strided]
        with inside:
            result = function(*args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        dense = [t for t in outputs if t.layout == torch.strided]
        found = []
        if known and len(dense) == len(outputs) and len(before) == len(tensors):
            written = written_arguments(function, args, kwargs)
            found = self.describe(function, name, args, kwargs, before, dense, written)
            for operator in found if self.registry.get(function.overloadpacket) else ():
                formula = self.registry[function.overloadpacket]
                operator.flop = formula(*args, **kwargs, out_val=result)
        else:
            reads = [use for _, use in before]
            writes = [self.write(t) for t in dense]
            found = [Operator(name, "unknown", "", "", reads, writes, 0, barrier=True)]
        for operator in found:
            operator.phase, operator.line = phase, line
            if phase == "optimizer":
                operator.kind = "library"
        self.parts.append(range(len(self.operators), len(self.operators) + len(found)))
        self.operators += found
        return result

    def write(self, tensor: torch.Tensor) -> Use:
        """Note that this memory has something new in it."""
        number = self.number(tensor.untyped_storage())
        self.version[number] += 1
        self.unwritten.discard(number)
        return self.use(tensor)

    def describe(self, function, name, args, kwargs, before, outputs, written) -> list[Operator]:
        """What an operator does, as one or two passes over its data; none for a view."""
        inputs = [tensor for tensor, _ in before]
        known = {use.key[0] for _, use in before}
        fresh = [t for t in outputs if self.number(t.untyped_storage()) not in known]
        if not written and not fresh and outputs:
            return []
        if name.startswith(NO_WORK):
            self.unwritten |= {self.number(t.untyped_storage()) for t in fresh}
            return []
        overwrites = name in OVERWRITE or function._overloadname.endswith("out")
        ids, known_here = {id(t) for t in written}, function.namespace == "aten"
        reads = []
        for tensor, use in before:
            blind = overwrites and id(tensor) in ids
            reads.append(use._replace(bytes=0) if blind else use)
            if use.key[0] in self.unwritten and not blind and known_here:
                self.notes.add(f"{name} reads what no operator wrote: a kernel that is not seen")
        reads = list(dict.fromkeys(reads))
        writes = [self.write(t) for t in [*written, *fresh]]
        tags, base = function.tags, name.rstrip("_")
        numel = max((t.numel() for t in [*inputs, *outputs]), default=0)
        operator = Operator(name, "unknown", "", "", reads, writes, numel)
        operator.dtype = str(outputs[0].dtype).removeprefix("torch.") if outputs else ""
        first = inputs[0] if inputs else None
        if function.namespace != "aten":
            return [operator]
        mask = name == "index" and any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:])
        dynamic = torch.Tag.dynamic_output_shape in tags and (name != "index" or mask)
        if torch.Tag.data_dependent_output in tags or dynamic:
            operator.kind, operator.barrier = "library", True
        elif function.overloadpacket in self.registry or any(word in name for word in PRODUCTS):
            operator.kind = "matrix"
        elif base.startswith(("_fused_adam", "_fused_sgd", "_foreach", "sort", "topk")):
            operator.kind = "library"
        elif norm := next((n for n in NORMS if n in name), None):
            return self.norm(operator, norm, name, args, first, before, len(written))
        elif name.removesuffix("_backward_data") in SOFTMAX:
            dim = args[1] if isinstance(args[1], int) else args[2]
            operator.kind = "stream"
            self.reduce(operator, first, [dim])
        elif name in GATHER:
            operator.kind, operator.source = "stream", {reads[0].key}
            row = first.shape[-1] * first.element_size() if name != "gather" else 4
            wanted = sum(w.bytes for w in writes) * max(1, SECTOR // max(1, row))
            reads[0] = reads[0]._replace(bytes=min(reads[0].bytes, wanted))
            operator.numel = max((t.numel() for t in outputs), default=0)
            if name.startswith("nll_loss"):  # a row picks one of its own elements
                operator.numel, operator.closed, operator.source = first.numel(), True, set()
        elif name in SCATTER:
            operator.kind, operator.closed = "stream", True
            if written:  # what is added to is read and written where it is added to
                added = max((use.bytes for use in reads[1:]), default=0)
                reads[0] = reads[0]._replace(bytes=min(reads[0].bytes, added))
                writes[0] = writes[0]._replace(bytes=min(writes[0].bytes, added))
                operator.source = {reads[0].key}
        elif name in REDUCE and first is not None:
            operator.kind = "stream"
            dims = args[1] if len(args) > 1 else kwargs.get("dim")
            dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
            self.reduce(operator, first, dims if isinstance(dims, (list, tuple)) else None)
        elif torch.Tag.pointwise in tags or name in STREAM or base in STREAM:
            operator.kind = "stream"
            operator.closed = name.endswith("_loss") and outputs[0].numel() < first.numel()
        return [operator]

    def reduce(self, operator: Operator, tensor: torch.Tensor, dims: Sequence[int] | None) -> None:
        """Note what is summed in a row or in a column, and whether one kernel can use the sums."""
        dims = {d % max(1, tensor.dim()) for d in dims} if dims else set(range(tensor.dim()))
        length = math.prod(tensor.shape[d] for d in dims) or 1
        wide = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
        inner = min(wide, key=tensor.stride, default=None)
        set_reduced(operator, tensor.numel(), length, inner is not None and inner not in dims)

    def norm(self, operator, norm, name, args, first, before, written) -> list[Operator]:
        """A norm in one pass if a block has the whole of what it normalises, else in two."""
        x = first if "backward" not in name else before[1][0]
        if norm == "batch_norm":
            length = x.numel() // max(1, x.shape[1])
        elif norm == "group_norm":
            samples, _, _, groups = [a for a in args if isinstance(a, int)][:4]
            length = x.numel() // max(1, samples * groups)
        else:
            shape = next((a for a in args if isinstance(a, (list, tuple))), x.shape[-1:])
            length = math.prod(shape)
        operator.kind = "stream"
        operator.numel = x.numel()
        set_reduced(operator, x.numel(), length, norm == "batch_norm" and x.dim() == 2)
        main = operator.writes[written:][:1]
        rest = [use for use in operator.writes if use not in main]
        line = operator.reads
        if operator.closed:  # statistics first, then each element
            sums = Use((len(self.sizes), 0), 0, 8 * max(1, x.numel() // length))
            self.sizes.append(sums.bytes)
            self.version.append(0)
            first_pass = Operator(
                f"{name} (sums)", "stream", "", "", line, [sums, *rest], x.numel()
            )
            first_pass.closed = True
            second = Operator(name, "stream", "", "", [*line, sums], main, x.numel())
            second.kernels = 0
            return [first_pass, second]
        if "backward" in name and rest:  # gradients of the weights are sums over all rows
            columns = Operator(f"{name} (weights)", "stream", "", "", line, rest, x.numel())
            columns.closed, columns.kernels = True, 0
            operator.writes = main
            return [operator, columns]
        return [operator]


def set_reduced(operator: Operator, numel: int, length: int, columns: bool) -> None:
    """Sums of so many elements each: long ones are complete when the kernel has ended."""
    results = numel // max(1, length)
    few, long = (FEW_COLUMNS, LONG_COLUMN) if columns else (FEW_ROWS, LONG_ROW)
    operator.numel = numel
    operator.closed = results < few and length > long
    operator.reduced = None if operator.closed or length == 1 else (numel, length, columns)


def written_arguments(function, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operator writes into, as its schema says."""
    found = []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.is_write:
            found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found
