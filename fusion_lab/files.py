"""Files: read as checked, written whole or not at all."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from fusion_lab.cli import ToolError

ROOT = Path(__file__).resolve().parent.parent


def below(top: Path, pattern: str) -> list[Path]:
    """Files below a folder that match; neither hidden ones nor what the wrappers of profilers have
    set aside."""

    def aside(part: str) -> bool:
        return part.startswith(".") or part.endswith((".failed", ".previous"))

    found = sorted(top.rglob(pattern))
    return [path for path in found if not any(map(aside, path.relative_to(top).parts))]


def read_json(path: Path) -> dict:
    """A JSON object; ToolError if the file cannot be read or holds something else."""
    try:
        content = json.loads(path.read_bytes(), parse_constant=refuse)
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{path}: not JSON, or cut off ({error})") from error
    if not isinstance(content, dict):
        raise ToolError(f"{path}: not a JSON object")
    return content


def refuse(constant: str) -> None:
    """What json.loads calls for NaN and infinity, which are no JSON."""
    raise ValueError(f"{constant} is no number")


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file beside `path` and move it there, so that a reader never sees half.

    Each writer has a file of its own, so of several at once the last one wins.
    """
    if not path.name:
        raise ToolError(f"{path}: not the name of a file")
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.exists() and not target.is_file():
            raise ToolError(f"{path}: cannot write there (it is not a file)")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp{target.suffix}")
        try:
            write(temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ToolError(f"{path}: cannot write there ({error.strerror or error})") from error


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file; in UTF-8, as `printable` says."""
    write_file(path, lambda file: file.write_text(printable(text), encoding="utf-8"))


def printable(text: str) -> str:
    """The text with what UTF-8 cannot encode, as bytes of a folder's name, written as on a
    terminal: with a backslash."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
