"""`make bench` runs every benchmark of the command line, one after the other.

    make bench [ARGS="kv engine"]      names: engine, kv, router; default all

The others in this folder are run by name: each file's docstring says how.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = ("engine", "kv", "router")


def main() -> int:
    """Runs the benchmarks named in the command line, or all; returns the first failure's exit status, else 0."""
    wanted = sys.argv[1:] or NAMES
    unknown = set(wanted) - set(NAMES)
    if unknown:
        print(f"no benchmark {', '.join(sorted(unknown))}; there is {', '.join(NAMES)}", file=sys.stderr)
        return 2
    baton = str(Path(sys.executable).parent / "baton")
    results = [subprocess.run([baton, "bench", name], check=False).returncode for name in wanted]
    return next((code for code in results if code), 0)


if __name__ == "__main__":
    sys.exit(main())
