"""Records what a program launches in Triton's interpreter: kernel, arguments, tensors before and
after. Another process, in which Triton compiles, executes the same and compares.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fusion_lab.cli import ToolError, note, say
from fusion_lab.files import ROOT
from fusion_lab.script import find_script, load_script


@dataclass(frozen=True)
class View:
    """A tensor as a view of a storage, which has a number."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    behind: int  # bytes of the storage

    @staticmethod
    def on(storage: int, tensor: Tensor) -> View:
        """This tensor, whose storage gets the number."""
        places = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return View(storage, tensor.dtype, *places, tensor.untyped_storage().nbytes())

    # what Triton's compiler asks a tensor for, beside the type: alignment, as if the storage began
    # at 0, and whether 31 bits count its bytes

    def data_ptr(self) -> int:
        return self.offset * self.dtype.itemsize

    def ptr_range(self) -> int:
        return self.behind

    def of(self, storages: list[Tensor]) -> Tensor:
        """The tensor on these storages, which are tensors of bytes."""
        storage = storages[self.storage].untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def of_bytes(self, storage: Tensor) -> Tensor:
        """The same places of a storage that has an element for each byte."""
        size = self.dtype.itemsize
        strides = (*(size * step for step in self.stride), 1)
        return storage.as_strided((*self.size, size), strides, size * self.offset)


@dataclass
class Recorded:
    """A launch; storages are tensors of bytes."""

    kernel: str  # name of the function
    file: str  # where it is defined
    grid: tuple[int, ...]
    arguments: dict[str, object]  # tensors as View
    before: list[Tensor]
    after: list[Tensor]

    def key(self) -> str:
        """Equal for launches that differ in the tensors' values only."""
        return repr((self.kernel, self.file, self.grid, self.arguments))

    def with_tensors(self, storages: list[Tensor]) -> dict[str, object]:
        """The arguments with tensors on these storages."""
        return {
            name: value.of(storages) if isinstance(value, View) else value
            for name, value in self.arguments.items()
        }


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the storage behind a tensor, not copied."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def bfloat16_mended() -> contextlib.ExitStack:
    """While this is entered the interpreter computes with bfloat16 as what it is, not as with the
    integers that it keeps it in, and rounds to it as a GPU does, not towards zero."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast(builder, source, kind, *rounding):
        if kind.scalar != tl.bfloat16:
            return plain_cast(builder, wide(source), kind)
        numbers = torch.from_numpy(plain_cast(builder, wide(source), tl.float32).data)
        rounded = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(rounded, tl.bfloat16)

    def binary(builder, a, b, operator):
        found = plain_binary(builder, wide(a), wide(b), operator)
        is_number = a.dtype.scalar == tl.bfloat16 and found.data.dtype != bool
        return cast(builder, found, tl.bfloat16) if is_number else found

    def dot(builder, a, b, *others):
        return plain_dot(builder, wide(a), wide(b), *others)

    plain_cast, plain_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    plain_binary = InterpreterBuilder.binary_op
    stack = contextlib.ExitStack()
    for name, function in {"cast_impl": cast, "create_dot": dot, "binary_op": binary}.items():
        stack.enter_context(mock.patch.object(InterpreterBuilder, name, function))
    return stack


def not_tuned(run: Callable) -> Callable:
    """An autotuner's `run`, of its first configuration: the interpreter's times say nothing."""

    def first(tuner, *given, **named):
        tuner.nargs = dict(zip(tuner.arg_names, given, strict=False))
        kept = tuner.prune_configs(named)
        if len(kept) > 1:
            name = tuner.base_fn.__name__
            note(f"{name}: the first of {len(kept)} configurations, {kept[0]}")
        with mock.patch.object(tuner, "configs", kept[:1]):
            return run(tuner, *given, **named)

    return first


@contextlib.contextmanager
def recording(seen: Callable[[Recorded], None]) -> Iterator[None]:
    """Call `seen` after each launch that is interpreted in this block."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def recorded(function, *given, grid, warmup, **named) -> None:
        parameters = inspect.signature(function.fn).parameters.values()
        arguments = {p.name: p.default for p in parameters if p.default is not p.empty}
        arguments |= dict(zip(function.arg_names, given, strict=False)) | named
        sizes = grid(arguments) if callable(grid) else grid
        numbers, storages = {}, []
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                place = value.untyped_storage().data_ptr()
                if place not in numbers:
                    numbers[place] = len(storages)
                    storages.append(bytes_of(value))
                arguments[name] = View.on(numbers[place], value)
        before = [storage.clone() for storage in storages]
        run(function, *given, grid=grid, warmup=warmup, **named)
        after = [storage.clone() for storage in storages]
        sizes = (sizes,) if isinstance(sizes, int) else tuple(map(int, sizes))
        file = inspect.getsourcefile(function.fn)
        seen(Recorded(function.__name__, file, sizes, arguments, before, after))

    with (
        bfloat16_mended(),
        mock.patch.object(InterpretedFunction, "run", recorded),
        mock.patch.object(Autotuner, "run", not_tuned(Autotuner.run)),
    ):
        yield


# --- programs, and training steps of version scripts


def is_version(file: str | Path) -> bool:
    """Whether a file has the functions of a version script."""
    with contextlib.suppress(ToolError):
        return find_script(str(file)).is_file()
    return False


def step_arguments(module: ModuleType, argv: Sequence[str], backend: str) -> argparse.Namespace:
    """The arguments of a version script that from here on launches what it would on the GPUs of
    this backend ("hip" or "cuda"): the same blocks and warps, and nothing left to PyTorch."""
    # without a GPU the script would ask for the interpreter
    with mock.patch("torch.cuda.is_available", lambda: True):
        args = module.parse_args(argv)
    args.device = "cpu"
    module.BACKEND, module.INTERPRETED = backend, False
    module.shared_memory = lambda: 2**31
    torch.set_float32_matmul_precision(args.matmul_precision)
    module.use_settings(args)
    return args


def take_step(module: ModuleType, args: argparse.Namespace, fake=None) -> None:
    """A training step of a version script; in a FakeTensorMode `fake`, on tensors without
    contents."""
    cpu = torch.device("cpu")
    batch = module.make_batches(args, cpu, args.seed).next_batch()
    with fake or contextlib.nullcontext():
        if fake:
            batch = {name: fake.from_tensor(value) for name, value in batch.items()}
        model = module.build_model(args, cpu)
        optimizer = module.build_optimizer(args, model)
        with torch.autocast("cpu", getattr(torch, args.amp_dtype), enabled=args.use_amp):
            loss = model(**batch)
        loss.backward()
        if args.use_amp and args.amp_dtype == "float16":  # as a gradient scaler does
            optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
        optimizer.step()


def main() -> None:
    """Record what the program launches that the command line names, behind the folder."""
    folder, file, *argv = sys.argv[1:]
    numbers = itertools.count()

    def save(launch: Recorded) -> None:
        Path(folder, f"{next(numbers):05}.pickle").write_bytes(pickle.dumps(launch))

    with recording(save):
        if is_version(file):
            module = load_script(file)
            module.wrap_triton = lambda kernel: kernel  # its own way in the interpreter is another
            take_step(module, step_arguments(module, argv, "hip"))
        else:
            sys.argv = [file, *argv]
            sys.path.insert(0, str(Path(file).resolve().parent))
            runpy.run_path(file, run_name="__main__")


@contextlib.contextmanager
def recorded(
    file: Path, argv: Sequence[str] = ()
) -> Iterator[tuple[subprocess.CompletedProcess, Iterator[Recorded]]]:
    """Run a program or a step in a process in which Triton interprets; how it ended, and what it
    has launched."""
    if not file.is_file():
        raise ToolError(f"{file}: no such file")
    if argv:
        note(f"{file.name} gets {' '.join(argv)}")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    with tempfile.TemporaryDirectory() as folder:
        code = "from fusion_lab.amd.record import main; main()"
        command = [sys.executable, "-c", code, folder, str(file), *argv]
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
        files = sorted(Path(folder).glob("*.pickle"))
        yield done, (pickle.loads(path.read_bytes()) for path in files)


def launches_of(file: Path, argv: Sequence[str] = ()) -> list[Recorded]:
    """What a program launches; of one that fails what it prints is passed on."""
    with recorded(file, argv) as (done, launches):
        found = list(launches)
    if done.returncode:
        say(*(f"{file} prints: {line}" for line in (done.stdout + done.stderr).splitlines()))
        note(f"{file} ended with status {done.returncode}")
    if not found:
        raise ToolError(f"{file} launches no kernel")
    return found
