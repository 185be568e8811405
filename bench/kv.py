"""The KV path's transports beside their peers: the same as `baton bench kv`, from a checkout.

.venv/bin/python -m bench.kv [--json FILE] [--plot FILE] [--rounds 7]
"""

from __future__ import annotations

import sys

from baton.console.main import app

if __name__ == "__main__":
    app(["bench", "kv", *sys.argv[1:]])
