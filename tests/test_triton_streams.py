"""V4's side streams: what one stream writes, another reads only after it has waited for it.

Vector clocks (Lamport 1978) stand in for streams: a captured graph keeps just this order.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from conftest import load, parse, words
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZES = {
    "tiny_llama_v4": "--vocab-size 40 --hidden-dim 32 --num-layers 3 --num-heads 2 --seq-len 8",
    "tiny_openfold_v4": "--num-blocks 2 --seq-len 5 --num-seqs 2 --msa-dim 16 --pair-dim 16"
    " --num-heads-msa 1 --num-heads-pair 1",
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
    """A storage: who has written a part of it, and who has read one since."""

    tensor: Tensor  # which keeps it: another may not get its address
    fresh: bool  # a kernel that gets a part first writes it
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Note each launch that does not know of another's on which it depends."""

    def __init__(self):
        super().__init__()
        self.streams = [Stream()]  # the current one last
        self.memory: dict[int, Memory] = {}
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
        if function.is_view:
            return results
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
            memory = self.memory.setdefault(at, Memory(tensor, False))
            access = access_of(tensor, stream)
            first = not any(overlap(access, other) for other in memory.writes)
            writes = tensor.data_ptr() in changed or (kernel and memory.fresh and first)
            self.check(function, memory, access, writes)
        for tensor in tensors_of(results):
            at = tensor.untyped_storage().data_ptr()
            if at not in self.memory:
                written = [] if fresh else [access_of(tensor, stream)]
                self.memory[at] = Memory(tensor, fresh, written)
        return results

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


@pytest.mark.parametrize("precision", ["", "--use-amp"], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("script", SIZES)
def test_each_stream_waits_for_what_it_reads(script: str, precision: str, monkeypatch):
    module = load(script)
    args = parse(script, *words(SIZES[script]), "--batch-size", "2", *words(precision))
    device = module.prepare(args)
    model = module.build_model(args, device)
    optimizer = module.build_optimizer(args, model)
    batch = module.make_batches(args, device, 0).next_batch()
    watch = Watch()
    for name, value in {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: True,
        "current_stream": lambda: watch.streams[-1],
        "Stream": Stream,
        "stream": watch.stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    with watch, torch.autocast("cpu", torch.bfloat16, enabled=args.use_amp):
        loss = model(**batch)
    with watch:
        loss.backward()
        optimizer.step()
    assert model.side.streams, "nothing ran beside the main stream"
    assert all(stream.number for stream in model.side.streams)
    assert not watch.races, "\n".join(watch.races[:20])
