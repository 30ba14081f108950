#!/usr/bin/env python3
"""Check that a version script trains here: three small steps, on the device that the script
chooses.

Other arguments go to the script, and win over what this check sets.

Examples:
  python setup/validation_scripts/test_training.py
  python setup/validation_scripts/test_training.py tiny_llama_v2.py --device cpu
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from checks import ROOT

from lab.cli import documented_parser
from lab.script import DEFAULT_SCRIPT

SMALL = ["--batch-size=1", "--seq-len=32", "--num-gpus=1", "--num-steps=3", "--warmup-steps=1"]
SMALL += ["--under-profiler"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 if the script did not end well."""
    parser = documented_parser(Path(__file__).name, __doc__)
    parser.add_argument("script", nargs="?", default=DEFAULT_SCRIPT, help="(default: %(default)s)")
    args, more = parser.parse_known_args(argv)
    places = Path(args.script), ROOT / args.script
    script = next((path for path in places if path.is_file()), None)
    if script is None:
        parser.error(f"{args.script}: no such file here or in {ROOT}")
    try:
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, str(script), *SMALL, "--profile-dir", directory, *more]
            status = subprocess.run(command).returncode
    except KeyboardInterrupt:
        status = 130
    failed = f"FAIL ({script.name} ended with status {status})"
    print(f"Training check: {failed if status else 'PASS'}")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
