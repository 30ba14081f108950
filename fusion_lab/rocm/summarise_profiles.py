#!/usr/bin/env python3
"""Write summary.json and summary.md of what run_all_profilers.sh ran into its directory, and print
the latter.

Usage: summarise_profiles.py DIR SCRIPT. DIR/steps.tsv has one line per step: name, exit status,
start as Unix time, seconds. Status 1 if a step failed; a step that ended with status 4 (tool,
package or device missing) was skipped.
"""

import json
import sys
from pathlib import Path

from fusion_lab.files import write_text
from fusion_lab.show import Column, render

FILES = {  # where each step leaves what one looks at first, as a pattern below the directory
    "pytorch_profiler": "pytorch/*_report.md",
    "flops": "flops/*_flops.csv",
    "rocprofv3": "rocprofv3_results_*/stats.csv",
    "rocprof_sys": "rocprof_sys_results/**/*.proto",
    "rocprof_compute": "rocprof_compute_results/**/*.[cp][sd][vf]",
}


def read_step(directory: Path, line: str) -> dict:
    """One step with its outcome, the last line of its log if it did not work, and its files."""
    name, *numbers = line.split("\t")
    status, start, seconds = map(int, numbers)
    # not by an earlier run
    written = [path for path in directory.glob(FILES[name]) if path.stat().st_mtime >= start]
    log = (directory / "logs" / f"{name}.log").read_text(errors="replace").strip().splitlines()
    return {
        "name": name,
        "status": {0: "ok", 4: "skipped"}.get(status, "failed"),
        "exit_status": status,
        "seconds": seconds,
        "reason": (log or ["it printed nothing"])[-1] if status else None,
        "files": [] if status else sorted(str(path.relative_to(directory)) for path in written),
    }


def where(step: dict) -> str:
    """The files of a step, or why there are none."""
    return ", ".join(f"`{name}`" for name in step["files"]) or step["reason"] or ""


def main(argv: list[str]) -> int:
    sys.stdout.reconfigure(errors="backslashreplace")  # a name that UTF-8 does not have
    directory, script = Path(argv[0]), argv[1]
    lines = (directory / "steps.tsv").read_text().splitlines()
    steps = [read_step(directory, line) for line in lines]
    content = json.dumps({"script": script, "steps": steps}, indent=1)
    write_text(directory / "summary.json", content + "\n")
    columns = [
        Column("step", "name"),
        Column("result", "status", text=True),
        Column("seconds", "seconds"),
        Column("where", where, text=True),
    ]
    text = f"# Profiles of {script}\n\n{render(columns, steps)}"
    write_text(directory / "summary.md", text + "\n")
    print(text)
    failed = [step["name"] for step in steps if step["status"] == "failed"]
    if failed:
        what = f"failed: {', '.join(failed)}; see {directory}/logs"
        print(f"run_all_profilers.sh: error: {what}", file=sys.stderr)
    elif steps and all(step["status"] == "skipped" for step in steps):
        print(f"run_all_profilers.sh: error: nothing ran; see {directory}/logs", file=sys.stderr)
        return 4
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
