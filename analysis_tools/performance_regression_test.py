#!/usr/bin/env python3
"""regression_tester.py under another name."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("regression_tester.py")), run_name="__main__")
