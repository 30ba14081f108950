"""Put the repository's root on sys.path: programs in a folder then import as those in the root do.

Each folder of programs has this file, and its programs import it first. All copies are the same;
the one in the root is for who imports a program from outside, such as a test.
"""

import sys
from pathlib import Path

root = next(folder for folder in Path(__file__).resolve().parents if (folder / "lab").is_dir())
if str(root) not in sys.path:
    sys.path.insert(0, str(root))
