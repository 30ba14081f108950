#!/usr/bin/env python3
"""The command find-fusions, from a clone: what of a training step could be one kernel."""

import sys

from fusion_lab.fusions.command import main

if __name__ == "__main__":
    sys.exit(main())
