"""Programs import this first: it puts the root of the repository on Python's path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lab.cli

sys.excepthook = lab.cli.say_what_is_missing
