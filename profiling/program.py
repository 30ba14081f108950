"""What the programs here share: command lines, errors, tables, files, and how to load a version script."""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.util
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_SCRIPT = "tiny_openfold_v2.py"
INTERFACE = ("build_parser", "parse_args", "build_model", "make_batches", "train", "main")
MODES = ("compare_fusion", "verify_accuracy", "under_profiler")
_read: set[str] = set()  # the files that the program that runs has read; see `reads`
MISSING = "it needs the package {0}, which is not there (pip install {0})"
NOT_FINISHED = {"oom": "out of memory", "failed": "failed"}  # what tables say of a run with this status


class ToolError(Exception):
    """Something the user can put right: one line on stderr and this exit status, no traceback."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all arguments)\n")


def require(*packages: str) -> None:
    """End with one line and status 4 where a package is missing that a program cannot even be read without."""
    for package in packages:
        try:
            found = package in sys.modules or importlib.util.find_spec(package)
        except ImportError:
            found = None
        if not found:
            print(f"{Path(sys.argv[0]).name}: error: {MISSING.format(package)}", file=sys.stderr)
            sys.exit(4)


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


class Default(str):
    """A script that no argument names: load_script says that it is taken."""


def add_script(parser: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup, default: str) -> None:
    """Add --script with this default."""
    parser.add_argument("--script", default=Default(default), metavar="FILE", help="(default: %(default)s)")


def tool_parser(prog: str, documentation: str | None) -> Parser:
    """A documented parser with --script and --profile-dir; what it does not know is for the script."""
    usage = "%(prog)s [arguments] [arguments of the script]"
    note = f"Every other argument goes to the script: python {DEFAULT_SCRIPT} --help lists them.\n\n"
    parser = documented_parser(prog, documentation, usage, note)
    add_script(parser, DEFAULT_SCRIPT)
    parser.add_argument("--profile-dir", metavar="DIR", help="for results (default: the script's own)")
    return parser


def find_script(name: str) -> Path:
    """The version script of this name, relative to the current directory or else to the repository."""
    path = next((path for path in (Path(name), ROOT / name) if path.is_file()), None)
    if path is None:
        raise ToolError(f"{name}: no such file here or in {ROOT}")
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ToolError(f"{name}: not a Python script ({error})") from error
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing := [function for function in INTERFACE if function not in defined]:
        raise ToolError(f"{name}: not a version script, it has no {missing[0]}()")
    return path.resolve()


def interpret_without_gpu() -> None:
    """Without a GPU have Triton run kernels in its interpreter, as V3 and V4 do: before any script imports Triton."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def load_script(name: str) -> ModuleType:
    """Import a version script by its path. It is looked at before, so nothing else is ever run."""
    path = find_script(name)
    if isinstance(name, Default):
        print_notes(Path(sys.argv[0]).name, f"no --script is given, {name} is taken")
    interpret_without_gpu()
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[path.stem]
        raise ToolError(f"--script {name}: it needs a package that is not there ({error})", status=4) from error
    return module


def script_arguments(
    module: ModuleType, argv: Sequence[str], profile_dir: str | None
) -> tuple[list[str], argparse.Namespace]:
    """The script's command line with --profile-dir, and what it parses it to: no mode that measures something else.

    The script itself says what is wrong with its arguments, and ends the program.
    """
    argv = [*argv, *(["--profile-dir", profile_dir] if profile_dir else [])]
    args = module.parse_args(argv)
    given = [f"--{mode.replace('_', '-')}" for mode in MODES if getattr(args, mode)]
    given += [f"--mode {mode}" for mode in getattr(module, "MODES", ()) if getattr(args, mode)]
    if given:
        raise ToolError(f"{given[0]} does not fit here: run {module.SCRIPT}.py itself for it")
    return argv, args


def run_tool(prog: str, body: Callable[[], int]) -> int:
    """Call `body` and return its exit status; what the user can put right is one line on stderr."""
    _read.clear()
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
        package = (error.name or str(error)).partition(".")[0]
        message, status = MISSING.format(package), 4
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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table, its columns aligned in the source too; those after the first `text_columns` hold numbers."""
    header, *rows = ([one_line(cell).replace("|", "\\|") for cell in line] for line in (header, *rows))
    widths = [max(3, *(len(line[i]) for line in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i < text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def drawing() -> ModuleType:
    """matplotlib.pyplot, which writes files and opens no window; ToolError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ToolError(f"the picture needs matplotlib (pip install matplotlib): {error}", status=4) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def cell(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A number for a table with its unit, a dash where there is none."""
    return "-" if value is None else format(value, form) + unit


def read_json(path: Path) -> dict:
    """A JSON object; ToolError if the file cannot be read or holds something else."""
    reads(path)
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{path}: not JSON, or cut off ({error})") from error
    if not isinstance(content, dict):
        raise ToolError(f"{path}: not a JSON object")
    return content


def reads(path: Path) -> Path:
    """The path of a file that is about to be read, on which the program then does not write."""
    _read.add(os.path.realpath(path))
    return path


def write_file(path: Path, write: Callable[[Path], object], replace: bool = False) -> None:
    """Have `write` make a file beside `path` and move it there, so that a reader never sees half of it.

    Each writer has a file of its own, so of several at once the last one wins. ToolError where this program has read
    from `path`, unless it is to `replace` that.
    """
    if not path.name:
        raise ToolError(f"{path}: not the name of a file")
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        if str(target) in _read and not replace:
            raise ToolError(f"{path}: it is an input, so nothing is written there; name another file")
        if target.exists() and not target.is_file():
            raise ToolError(f"{path}: cannot write there (it is not a file)")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp{target.suffix}")
        try:
            write(temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, UnicodeEncodeError) as error:
        raise ToolError(f"{path}: cannot write there ({getattr(error, 'strerror', None) or error})") from error


def write_text(path: Path, text: str, replace: bool = False) -> None:
    """Write or replace a text file."""
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), replace)


def as_cell(value: object) -> object:
    """The value for a CSV file: text that a spreadsheet would take for a formula begins with a '."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def write_csv(path: Path, rows: Sequence[dict]) -> None:
    """Write rows with the same keys, which become the header; None is an empty cell."""

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(map(as_cell, rows[0]))
            writer.writerows([as_cell(row[name]) for name in rows[0]] for row in rows)

    write_file(path, write)
