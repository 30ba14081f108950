"""Command lines of the programs here: arguments, what a user can put right in one line, exit
statuses."""

import argparse
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# What programs here import that can be missing, and how it is installed
SETUP = "bash setup/environment_setup.sh"
PACKAGES = {
    **dict.fromkeys(("torch", "triton", "numpy", "matplotlib", "msgspec"), SETUP),
    "gemmi": "pip install gemmi",
    "deepspeed": "pip install -r requirements-deepspeed.txt",
    "pptx": "pip install python-pptx",
    "resvg_py": "pip install resvg-py",
}


class ToolError(Exception):
    """Something the user can put right: one line on stderr and this exit status, no traceback."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line; help says what is taken if an argument is not given."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all arguments)\n")

    def add_flag(self, name: str, help: str) -> None:
        self.add_argument(name, action="store_true", help=help)

    def add_count(self, name: str, default: int, help: str = "", least: int = 1) -> None:
        help = f"{help} (default: {default})".strip()
        self.add_argument(name, type=at_least(least), default=default, metavar="N", help=help)

    def add_path(
        self,
        name: str,
        metavar: str,
        help: str = "",
        default: Path | None = None,
        required: bool = False,
    ) -> None:
        help = f"{help} (default: {default})".strip() if default else help
        more = {"required": True} if required else {}
        self.add_argument(name, type=Path, default=default, metavar=metavar, help=help, **more)


def missing(error: ModuleNotFoundError) -> str:
    """What to say of a module that an import lacks. A package is advised for those that programs
    here import: one on PyPI that has the name of anybody's module is a stranger's."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        return str(error)
    return f"it needs the package {package}, which is not there ({PACKAGES[package]})"


def at_least(low: int) -> Callable[[str], int]:
    """argparse type: a whole number not below `low`, which is 0 or more."""

    def whole_number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number, {low} or more, not {text!r}")
        return int(text)

    return whole_number


def positive(most: float = math.inf) -> Callable[[str], float]:
    """argparse type: a number above 0, and not above `most`."""

    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < float(text) <= most and math.isfinite(float(text)):
                return float(text)
        limit = "" if math.isinf(most) else f" and not above {most:g}"
        raise argparse.ArgumentTypeError(f"must be above 0{limit}, not {text!r}")

    return number


def several(
    kind: Callable[[str], object] = str, among: Sequence[str] = ()
) -> Callable[[str], list]:
    """argparse type: values of this type with commas between them, each once; `among` these."""

    def values(text: str) -> list:
        found = list(dict.fromkeys(kind(part) for part in text.split(",")))
        if unknown := [value for value in found if among and value not in among]:
            raise argparse.ArgumentTypeError(f"{unknown[0]}: there are {', '.join(among)}")
        return found

    return values


def documented_parser(
    prog: str, documentation: str | None, usage: str | None = None, note: str = ""
) -> Parser:
    """A parser whose help is the documentation of a program, the examples last, behind the note."""
    # there is none under python -OO
    description, _, examples = (documentation or "").partition("\nExamples:\n")
    return Parser(
        prog=Path(prog).name,
        usage=usage,
        description=description,
        epilog=f"{note}examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run_tool(prog: str, body: Callable[[], int]) -> int:
    """Call `body` and return its exit status; what the user can put right is one line on stderr."""
    if hasattr(sys.stdout, "reconfigure"):
        # a name that the terminal's encoding does not have
        sys.stdout.reconfigure(errors="backslashreplace")
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
    except OSError as error:  # what may not be read or written, is named too long, or in the way
        where = f"{error.filename}: " if error.filename else ""
        message, status = f"{where}{error.strerror or error}", 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    print(f"{prog}: error: {one_line(message)}", file=sys.stderr)
    return status


def program(
    build_parser: Callable[[], Parser], body: Callable[..., int], of_scripts: bool = False
) -> Callable[[Sequence[str] | None], int]:
    """The `main` of a program, which calls `body` with the arguments and returns its exit status.
    With `of_scripts`, `body` gets what the parser does not know as a second list."""

    def main(argv: Sequence[str] | None = None) -> int:
        parser = build_parser()
        if not of_scripts:
            args = parser.parse_args(argv)
            return run_tool(parser.prog, lambda: body(args))
        args, rest = parser.parse_known_args(argv)
        return run_tool(parser.prog, lambda: body(args, rest))

    return main


SIGN_SECONDS = 5.0  # between two signs of life


@contextlib.contextmanager
def sign_of_life(what: str) -> Iterator[None]:
    """Say on stderr every five seconds that the work inside goes on, and since when."""
    ended = threading.Event()
    stream = sys.stderr  # the work inside may be silenced
    began = time.monotonic()

    def watch() -> None:
        while not ended.wait(SIGN_SECONDS):
            line = f"{what}: at work since {time.monotonic() - began:.0f} s"
            print(line, file=stream, flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def one_line(text: str) -> str:
    """The text without line breaks, which a name of a file, run or device can have."""
    return " ".join(text.splitlines())


def say(*lines: str) -> None:
    """Print on stderr, with the name of the program: of its folder where that is a package."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    for line in lines:
        print(f"{name}: {one_line(line)}", file=sys.stderr)


def note(*lines: str) -> None:
    """Say on stderr what the user should know beside a result."""
    say(*(f"note: {line}" for line in lines))
