#!/usr/bin/env python3
"""Start Python programs from a process that has imported PyTorch: 0.2 s in place of 3.5 s.

It is for tests, which start hundreds. `start` makes a server and returns the path of a program
that takes the place of the interpreter: it hands its command line, environment, working
directory and standard files to the server, passes signals on, and ends as the program ends.

The server forks for each program. It has one thread and never runs a tensor operation, so a
fork is as good as a fresh process. Where it would not be, the interpreter itself runs the
program: see `needs_fresh_process`. A program has a process group of its own; nothing of it
outlives the program or its caller. The server ends with the process that started it.

Not as in a fresh process: the program's parent is a part of the server, its command line in /proc
is the server's, and what Python does with modules at its very end is left out.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Variables that Python, PyTorch, Triton or a library of theirs looks at when it is imported.
AT_IMPORT = re.compile(
    r"PYTHON(?!UNBUFFERED|PATH)\w|LANG|LC_|LD_|OMP_|MKL_|OPENBLAS_"
    r"|PYTORCH_|TORCH(?!ELASTIC_|_NCCL_|INDUCTOR_CACHE_)|TRITON_"
)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a fork cannot change."""
    return {name: value for name, value in environment.items() if AT_IMPORT.match(name)}


# --- the program that takes the place of the interpreter


def needs_fresh_process(argv: list[str], server: dict[str, str]) -> bool:
    """Whether a fork cannot stand for this command, because something of it is special."""
    files = len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    if settings(os.environ) != server or files != 3:
        return True
    words = [word for word in argv if word not in ("-B", "-u")]
    if words[:1] in (["-c"], ["-m"], ["-"]):
        return False
    if not words or words[0].startswith("-") or not os.path.isfile(words[0]):
        return True
    with open(words[0], "rb") as file:  # Triton is imported already, with another setting
        text = file.read()
    if re.search(rb'\["TRITON_INTERPRET"\] = "0"(?! if)', text):
        return True
    chooses = b'["TRITON_INTERPRET"] =' in text or b"exercises.puzzles" in text
    return chooses and server.get("TRITON_INTERPRET") != "1"


def ask(directory: str, argv: list[str]) -> int:
    """Have the server run a program; returns its exit status, or dies of the signal it died of."""
    with open(os.path.join(directory, "settings"), encoding="utf-8") as file:
        server = json.load(file)
    if needs_fresh_process(argv, server):
        os.execv(sys.executable, [sys.executable, *argv])
    request = json.dumps([argv, os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(directory, "socket"))
        socket.send_fds(connection, [len(request).to_bytes(8, "little")], [0, 1, 2])
        connection.sendall(request)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
        status = int(connection.recv(16))
    if status < 0:
        if -status != signal.SIGKILL:  # which has no other answer
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


# --- the server


def watch(pid: int, connection: socket.socket) -> None:
    """Pass signals on to a program's group until it ends, and say how; its caller gone, kill it."""
    end = os.pidfd_open(pid)
    while end not in select.select([end, connection], [], [])[0]:
        number = connection.recv(1)
        os.killpg(pid, number[0] if number else signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.killpg(pid, signal.SIGKILL)  # what it has left; the group exists until the next line
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # its caller is gone
        connection.sendall(str(status).encode())


def answer(connection: socket.socket, directory: str) -> None:
    """Run the program that a request asks for, in a child of this process."""
    size, files, *_ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        argv, cwd, environment = json.loads(stream.read(int.from_bytes(size, "little")))
    if pid := os.fork():
        with contextlib.suppress(PermissionError):  # another program already, with a group
            os.setpgid(pid, pid)
        for file in files:
            os.close(file)
        watch(pid, connection)
        os._exit(0)
    connection.close()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    status = become(argv, os.path.join(directory, "python"))
    threading._shutdown()  # the interpreter waits for threads, too
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # to take down all of PyTorch's modules would last longer than the program


def become(argv: list[str], python: str) -> int:
    """Do what the interpreter does with this command line; returns the exit status."""
    tempfile.tempdir = None  # it follows from the environment
    sys.executable = python  # what the program starts is forked, too
    options = [argv.pop(0) for word in list(argv) if argv[0] in ("-B", "-u")]
    sys.dont_write_bytecode |= "-B" in options
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    unbuffered = "-u" in options or "PYTHONUNBUFFERED" in os.environ
    sys.stdout.reconfigure(line_buffering=unbuffered or sys.stdout.isatty())
    try:
        if argv[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), argv[1:]
            sys.modules.pop(argv[1], None)  # runpy would warn that it is imported already
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        elif argv[0] in ("-c", "-"):
            text, name = (
                (argv.pop(1), "<string>") if argv[0] == "-c" else (sys.stdin.read(), "<stdin>")
            )
            sys.path[0], sys.argv = "", argv
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
        else:
            sys.path[0], sys.argv = os.path.dirname(os.path.realpath(argv[0])), argv
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(directory: str) -> None:
    """Answer requests as long as the process that started this one lives, each in a fork."""
    import quicker  # of this directory
    import torch._dynamo
    import torch.distributed.run  # noqa: F401 - what many programs would import
    import triton.experimental.gluon  # noqa: F401 - what the first kernel would import

    if os.environ.get("TRITON_INTERPRET") == "1":
        quicker.make_quicker()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a fork would not have the other threads: is OMP_NUM_THREADS 1?"
    gc.freeze()  # no program need look through what is imported here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that watch
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(directory, "socket"))
        listener.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return answer(connection, directory)
            connection.close()
    shutil.rmtree(directory)
    os._exit(0)


SERVERS: list[subprocess.Popen] = []  # a server ends when it is no longer referred to


def start() -> str:
    """Start a server; returns the path of the program that takes the place of this interpreter."""
    directory = tempfile.mkdtemp(prefix="fork_server_")
    with open(os.path.join(directory, "settings"), "w", encoding="utf-8") as file:
        json.dump(settings(os.environ), file)
    program = shlex.join([sys.executable, "-I", "-S", __file__, directory])
    python = os.path.join(directory, "python")
    with open(python, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nexec {program} "$@"\n')
    os.chmod(python, 0o755)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    SERVERS.append(subprocess.Popen([sys.executable, __file__, directory], **pipes))
    if not SERVERS[-1].stdout.readline():
        raise RuntimeError("the fork server does not start: its error is above")
    return python


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
