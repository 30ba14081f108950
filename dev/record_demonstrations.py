#!/usr/bin/env python3
"""Record the demonstrations of docs/INSTRUCTOR.md on this machine: v1.txt to v4.txt, each block
with what it prints.

Examples:
  python dev/record_demonstrations.py results/h100/demonstrations
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import ROOT, write_text

PAGE = ROOT / "docs/INSTRUCTOR.md"


def as_text(block: dict, log: str) -> str:
    """A block as typed, then its output; of a line that was written over what was last there."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.splitlines()]
    return f"$ {block['text']}" + "\n".join(lines).rstrip() + "\n"


def record(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="demonstrations_") as name:
        logs = Path(name)
        command = [sys.executable, ROOT / "exercises/run_sheet.py", PAGE, "--log", logs]
        if subprocess.run(command).returncode:
            raise ToolError(f"{PAGE.name}: a block failed, see above; nothing is recorded")
        sessions: dict[str, list[str]] = defaultdict(list)
        for block in json.loads((logs / "summary.json").read_text())["blocks"]:
            session = re.match(r"Session (\d)", block["exercise"])
            if session and block["log"]:
                log = (logs / block["log"]).read_text(errors="replace")
                sessions[session[1]].append(as_text(block, log))
    args.folder.mkdir(parents=True, exist_ok=True)
    for number, texts in sessions.items():
        write_text(args.folder / f"v{number}.txt", "\n".join(texts))
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    return parser


main = program(build_parser, record)

if __name__ == "__main__":
    sys.exit(main())
