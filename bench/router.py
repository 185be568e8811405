"""What the router costs: ``.venv/bin/python bench/router.py [ttft cpu …]``; the same as ``baton bench router``.

Needs a quiet machine. Rows: TTFT added, streamed tok/s, CPU per request, memory growth, goodput under overload.
"""

from __future__ import annotations

import sys

from baton.console.bench.router.report import FIGURES, show

if __name__ == "__main__":
    sys.exit(show(tuple(sys.argv[1:]) or FIGURES, rounds=3, requests=20_000, seconds=10.0, json_file=None))
