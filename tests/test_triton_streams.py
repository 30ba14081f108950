"""V4's side streams: what one stream writes, another reads only after it has waited for it, and
what is freed is not given to new work before the last reader is done.

Vector clocks (Lamport 1978) stand in for streams: a captured graph keeps just this order.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from conftest import SMALLEST, load, model_of, parse, words
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEPS = {  # script, arguments, parameters whose gradients a side stream computes
    "llama": ("tiny_llama_v4", "--num-layers 3 --use-amp", "layers"),
    "openfold": ("tiny_openfold_v4", "--num-blocks 2", "blocks"),
    "openfold-bfloat16": (
        "tiny_openfold_v4",
        # the library computes some products of wide rows
        "--num-blocks 2 --msa-dim 256 --num-heads-msa 4 --use-amp",
        "blocks",
    ),
    "openfold-checkpoint": (  # casts are made again in the backward pass
        "tiny_openfold_v4",
        "--num-blocks 2 --use-amp --checkpoint-blocks --disable-loss-fusion",
        "blocks",
    ),
    "openfold-without-kernels": (
        "tiny_openfold_v4",
        "--num-blocks 2 --disable-all-fusion --enable-fused-optimizer --enable-overlap",
        "",
    ),
}


class Stream:
    """Stand in for a stream, and for an event of one: what it knows to be done, by stream."""

    def __init__(self, **unused):
        self.number = 0  # of its launches
        self.done: dict[Stream, int] = {}

    def record_event(self) -> Stream:
        event = Stream()
        event.done = {**self.done, self: self.number}
        return event

    def wait_event(self, event: Stream) -> None:
        for stream, number in event.done.items():
            self.done[stream] = max(number, self.done.get(stream, 0))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def knows(self, stream: Stream, number: int) -> bool:
        return stream is self or self.done.get(stream, 0) >= number


@dataclass
class Access:
    """A launch, by stream and number, and the bytes that it read or wrote."""

    begin: int
    end: int
    stream: Stream
    number: int


@dataclass
class Memory:
    """A storage: which stream may reuse it, who has written a part of it, and who has read one."""

    storage: StorageWeakRef
    owner: Stream
    fresh: bool  # a kernel that gets a part first writes it
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Note each launch that does not know of another's on which it depends."""

    def __init__(self):
        super().__init__()
        self.streams = [Stream()]  # the current one last
        self.memory: dict[int, Memory] = {}
        self.freed: list[Memory] = []
        self.races: list[str] = []

    @contextlib.contextmanager
    def stream(self, stream: Stream | None):
        self.streams.append(stream or self.streams[0])
        try:
            yield
        finally:
            self.streams.pop()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        stream = self.streams[-1]
        stream.number += 1
        if self.streams[0] not in {stream, *stream.done}:
            self.races.append(f"{function} does not belong to the graph")
        if function.is_view:
            return results
        self.check_freed(function, stream)
        empty = "empty" in str(function)  # reads no element
        fresh = empty or "zeros" in str(function)
        kernel = function.namespace != "aten"
        changed = []
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed += [t.data_ptr() for t in tensors_of(value)]
        inputs = [] if empty else tensors_of((args, kwargs))
        if "adamw" in str(function):
            changed.append(inputs[0].data_ptr())
        for tensor in inputs:
            at = tensor.untyped_storage().data_ptr()
            if at not in self.memory:
                self.memory[at] = memory_of(tensor, self.streams[0], False)
            memory = self.memory[at]
            access = access_of(tensor, stream)
            first = not any(overlap(access, other) for other in memory.writes)
            writes = tensor.data_ptr() in changed or (kernel and memory.fresh and first)
            self.check(function, memory, access, writes)
        for tensor in tensors_of(results):
            at = tensor.untyped_storage().data_ptr()
            if at not in self.memory:
                self.memory[at] = memory_of(tensor, stream, fresh)
                if not fresh:
                    self.memory[at].writes.append(access_of(tensor, stream))
        return results

    def check_freed(self, function, stream: Stream) -> None:
        """What this stream launches may get memory that was its own and has been freed."""
        gone = [at for at, memory in self.memory.items() if memory.storage.expired()]
        self.freed += map(self.memory.pop, gone)
        for memory in [memory for memory in self.freed if memory.owner is stream]:
            accesses = (*memory.writes, *memory.reads)
            if not all(stream.knows(access.stream, access.number) for access in accesses):
                self.races.append(f"{function} may get memory that another stream still uses")
            self.freed.remove(memory)

    def check(self, function, memory: Memory, access: Access, writes: bool) -> None:
        stream = access.stream
        for other in memory.writes:
            if overlap(access, other) and not stream.knows(other.stream, other.number):
                self.races.append(f"{function} does not wait for what it reads")
        if not writes:
            memory.reads.append(access)
            return
        for other in memory.reads:
            if overlap(access, other) and not stream.knows(other.stream, other.number):
                self.races.append(f"{function} does not wait for who reads what it writes")
        memory.writes.append(access)


def memory_of(tensor: Tensor, owner: Stream, fresh: bool) -> Memory:
    return Memory(StorageWeakRef(tensor.untyped_storage()), owner, fresh)


def access_of(tensor: Tensor, stream: Stream) -> Access:
    """The bytes from a tensor's first element to its last."""
    steps = ((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    size = (1 + sum(steps)) * tensor.element_size() if tensor.numel() else 0
    return Access(begin, begin + size, stream, stream.number)


def overlap(one: Access, other: Access) -> bool:
    return one.begin < other.end and other.begin < one.end


def tensors_of(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", STEPS)
def test_each_stream_waits_for_what_it_reads_and_for_who_read_what_it_writes(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    script, argv, at_the_side = STEPS[name]
    module = load(script)
    args = parse(script, *SMALLEST[model_of(script)], *words(argv))
    device = module.prepare(args)
    model = module.build_model(args, device)
    optimizer = module.build_optimizer(args, model)
    batch = module.make_batches(args, device, 0).next_batch()
    watch = Watch()
    for function, value in {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: True,
        "current_stream": lambda: watch.streams[-1],
        "Stream": Stream,
        "stream": watch.stream,
    }.items():
        monkeypatch.setattr(torch.cuda, function, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    with watch, torch.autocast("cpu", torch.bfloat16, enabled=args.use_amp):
        loss = model(**batch)
    with watch:
        loss.backward()
        optimizer.step()
    gradients, updates = model.side.streams
    assert updates.number
    assert bool(gradients.number) == bool(at_the_side)
    if at_the_side:
        assert {*model.get_submodule(at_the_side).parameters()} <= {*model.side.written}
    assert not watch.races, "\n".join(watch.races[:20])
