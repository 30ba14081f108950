#!/usr/bin/env python3
"""Copy what version scripts share from dev/parts/ into them, each script being one self-contained
file.

dev/parts/NAME.py stands in a script between the lines `# --- NAME` and `# --- end of NAME`;
dev/parts/NAME_MODEL.py in the scripts of that model alone. A script without the first of these
lines does without that part.

Usage:
  python dev/sync_parts.py            copy every part into the scripts that have it
  python dev/sync_parts.py --check    exit 1 and name the scripts that differ
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def split(path: Path, name: str) -> tuple[str, str, str] | None:
    """What stands before, in and after this part of a script; None without it."""
    begin, end = f"\n# --- {name}\n", f"\n# --- end of {name}\n"
    text = path.read_text()
    if begin not in text:
        return None
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(end) < text.index(begin):
        sys.exit(f"{path}: not one line '{begin.strip()}' with one line '{end.strip()}' after it")
    before, _, rest = text.partition(begin)
    part, _, after = rest.partition(end)
    return before + begin, part.rstrip() + "\n", "\n" + end + after


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    differing = 0
    for source in sorted((ROOT / "dev/parts").glob("*.py")):
        name, _, model = source.stem.partition("_")
        for path in sorted(ROOT.glob(f"tiny_{model or '*'}_v*.py")):
            parts = split(path, name)
            if parts is None or parts[1] == source.read_text():
                continue
            differing += 1
            if args.check:
                differs = f"its part '{name}' differs from dev/parts/{source.name}"
                print(f"{path.name}: {differs}", file=sys.stderr)
            else:
                path.write_text(parts[0] + source.read_text() + parts[2])
                print(f"{path.name}: updated from dev/parts/{source.name}")
    return int(args.check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())
