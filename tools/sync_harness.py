#!/usr/bin/env python3
"""Keep the part that all version scripts share byte-identical.

Usage:
  python tools/sync_harness.py tiny_llama_v1.py   copy the harness of this script into all others
  python tools/sync_harness.py --check            exit 1 and name the scripts that differ
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "\n# --- harness\n", "\n# --- end of harness\n"


def split(path: Path) -> tuple[str, str, str]:
    """What stands before, between and after the two marker lines of a script."""
    before, _, rest = path.read_text().partition(BEGIN)
    harness, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{path}: no lines '{BEGIN.strip()}' and '{END.strip()}'")
    return before, harness, after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, metavar="FROM.py")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check == bool(args.source):
        parser.error("give the script to copy from, or --check")
    scripts = sorted(ROOT.glob("tiny_*_v*.py"))
    _, harness, _ = split(args.source or scripts[0])
    differing = [path for path in scripts if split(path)[1] != harness]
    for path in differing:
        if args.check:
            print(f"{path.name}: its harness differs from that of {scripts[0].name}", file=sys.stderr)
        else:
            before, _, after = split(path)
            path.write_text(before + BEGIN + harness + END + after)
            print(f"{path.name}: updated")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
