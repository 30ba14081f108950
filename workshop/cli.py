"""Command lines of the programs here: arguments, what a user can put right in one line, exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

inputs: set[str] = set()  # the files that the program that runs has read; see files.py


class ToolError(Exception):
    """Something the user can put right: one line on stderr and this exit status, no traceback."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all arguments)\n")


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """End with one line and status 4 where an import in this block lacks a package: a program cannot be read then."""
    try:
        yield
    except ModuleNotFoundError as error:
        print(f"{Path(sys.argv[0]).name}: error: {missing(error)}", file=sys.stderr)
        sys.exit(4)


def missing(error: ModuleNotFoundError) -> str:
    """What to install, in one line."""
    package = (error.name or str(error)).partition(".")[0]
    return f"it needs the package {package}, which is not there (pip install {package})"


def at_least(low: int) -> Callable[[str], int]:
    """argparse type: a whole number not below `low`, which is 0 or more."""

    def whole_number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number, {low} or more, not {text!r}")
        return int(text)

    return whole_number


def documented_parser(prog: str, documentation: str | None, usage: str | None = None, note: str = "") -> Parser:
    """A parser whose help is the documentation; its part after 'Examples:' comes last, behind the note."""
    description, _, examples = (documentation or "").partition("\nExamples:\n")  # there is none under python -OO
    return Parser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=f"{note}examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run_tool(prog: str, body: Callable[[], int]) -> int:
    """Call `body` and return its exit status; what the user can put right is one line on stderr."""
    inputs.clear()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding does not have
    try:
        status = body()
        if sys.stdout:  # it is None where a shell has closed it
            sys.stdout.flush()  # what cannot be written shows here and not after the end
        return status
    except ToolError as error:
        message, status = str(error), error.status
    except ModuleNotFoundError as error:
        message, status = missing(error), 4
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # a file or directory that may not be read or written, named too long, in the way
        where = f"{error.filename}: " if error.filename else ""
        message, status = f"{where}{error.strerror or error}", 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    print(f"{prog}: error: {one_line(message)}", file=sys.stderr)
    return status


def one_line(text: str) -> str:
    """The text without line breaks, which a name of a file, run or device can have."""
    return " ".join(text.splitlines())


def print_notes(prog: str, *lines: str) -> None:
    """Say on stderr what the user should know beside a result."""
    for line in lines:
        print(f"{prog}: note: {one_line(line)}", file=sys.stderr)
