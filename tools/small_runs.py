#!/usr/bin/env python3
"""What `run_sheet.py --shrink` does to version scripts and the profilers around them: small sizes and a quick start.

Sizes: one step after at most one of warm-up; sequence lengths 32, 64, 128, 256, ... become 8, 16, 24, 32, ..., batch
sizes 8, 16, 32, ... become 8, 12, 16, ..., so that what differs stays different; layers, blocks, sequences and
--pair-dim a quarter, heads and --msa-dim a half, other widths an eighth, the vocabulary a tenth. torch.compile traces
the model but generates no code (backend aot_eager). Results are those of other models then.

Start: importing PyTorch takes longer than such a run. A server imports it once and forks for each run, which has the
arguments, environment, directory, files and process group of the client, the command that stands for `python`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Scale = Callable[[int], int]


def divided_by(divisor: int) -> Scale:
    return lambda n: max(1, n // divisor)


def in_steps(step: int, first: int) -> Scale:
    """Twice as large becomes larger by `step`, beginning with `first`, which becomes `step`."""
    return lambda n: min(n, step * max(1, n.bit_length() - first.bit_length() + 1))


# Default of each size, as in the scripts (None: it follows from another one), and what becomes of it.
COMMON: dict[str, tuple[int | None, Scale]] = {
    "--num-steps": (50, lambda n: min(n, 1)),
    "--warmup-steps": (5, lambda n: min(n, 1)),
}
SIZES: dict[str, dict[str, tuple[int | None, Scale]]] = {
    "llama": {
        "--vocab-size": (None, divided_by(10)),
        "--hidden-dim": (512, divided_by(8)),
        "--num-layers": (8, divided_by(4)),
        "--num-heads": (8, divided_by(2)),
        "--num-kv-heads": (None, divided_by(2)),
        "--intermediate-dim": (None, divided_by(8)),
        "--seq-len": (256, in_steps(8, first=32)),
        "--batch-size": (8, in_steps(4, first=4)),
        **COMMON,
    },
    "openfold": {
        "--msa-dim": (64, divided_by(2)),
        "--pair-dim": (128, divided_by(4)),
        "--num-blocks": (4, divided_by(4)),
        "--num-seqs": (16, divided_by(4)),
        "--seq-len": (64, in_steps(8, first=32)),
        "--batch-size": (4, in_steps(4, first=4)),
        **COMMON,
    },
}
SCRIPTS = ("tiny_*.py", "run_pytorch_profiler.py", "run_deepspeed_flops.py")
DEFAULT_SCRIPT = "tiny_openfold_v2.py"  # of the profilers


def last_value(words: Sequence[str], flag: str) -> str | None:
    """The value that counts of a flag given as `--flag value` or `--flag=value`."""
    pairs = zip(words, (*words[1:], None), strict=True)
    values = [after if word == flag else word.partition("=")[2] for word, after in pairs if word.split("=")[0] == flag]
    return values[-1] if values else None


def shrink(command: Sequence[str]) -> list[str]:
    """The command line of a version script, or of a profiler around one, with small sizes.

    They are appended: the last value of an argument counts. A value that is not a number stays, so that the script can
    refuse it.
    """
    script = os.path.basename(command[0])
    if not script.startswith("tiny_"):
        script = os.path.basename(last_value(command, "--script") or DEFAULT_SCRIPT)
    model = re.fullmatch(r"tiny_(\w+)_v\d+\.py", script)
    words = list(command)
    for flag, (default, scale) in SIZES.get(model[1], {}).items() if model else ():
        value = last_value(words, flag) or str(default)
        if value.isdecimal():
            words += [flag, str(scale(int(value)))]
    return words


def accept(listener: socket.socket) -> socket.socket:
    """The connection to a client, in a process of its own. The server itself ends with the process that started it."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that it forks
    listener.settimeout(5)
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return connection
            connection.close()
    os._exit(0)


def take_over(connection: socket.socket) -> None:
    """Become what the client asks for; returns in the process that is to run sys.argv, and another reports its end."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    group, directory, environment, command = json.load(connection.makefile())
    if child := os.fork():
        for file in files:  # so that a pipe ends with the run
            os.close(file)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # the client has been killed
            connection.sendall(str(status).encode())
        os._exit(0)
    connection.close()
    os.setpgid(0, group)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = shrink(command)
    sys.path[0] = os.path.dirname(os.path.realpath(command[0]))


def serve() -> None:
    """Accept runs on the socket that is file descriptor 0, each in a process of its own."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as V3 does: what follows imports Triton
    import torch._dynamo
    import torch._inductor.config

    compile_with = torch.compile
    torch.compile = lambda module, mode: compile_with(module, backend="aot_eager")  # C++ would take minutes
    gc.freeze()  # what is there now is no garbage, and need not be looked at in every run
    take_over(accept(socket.socket(fileno=os.dup(0))))
    try:
        runpy.run_path(os.path.abspath(sys.argv[0]), run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)  # the rest of Python's exit, taking PyTorch apart, takes as long as a run
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def server(path: Path, environment: dict[str, str]) -> Iterator[None]:
    """Have a server on this socket. It needs seconds to start, for which clients wait."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, __file__]
        process = subprocess.Popen(command, env=environment, stdin=listener, preexec_fn=os.setpgrp)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def redirection(path: Path) -> str:
    """For a shell script in place of `python`: leaves what the server is for to the server on this socket."""
    client = shlex.join([sys.executable, "-S", "-E", __file__, str(path)])
    return f'case ${{1##*/}} in\n{" | ".join(SCRIPTS)}) exec {client} "$@" ;;\nesac\n'


def request(path: str, command: Sequence[str]) -> int:
    """Have the server run a command line with what this process has; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the run, too, which decides
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b" "], [0, 1, 2])
        connection.sendall(json.dumps([os.getpgrp(), os.getcwd(), dict(os.environ), command]).encode())
        connection.shutdown(socket.SHUT_WR)
        status = int(connection.recv(16))
    if status < 0:  # ended by a signal
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    else:
        sys.exit(request(sys.argv[1], sys.argv[2:]))
