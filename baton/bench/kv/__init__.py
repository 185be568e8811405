"""``baton bench kv``: benchmarks every path that KV can take, beside the machine's limits, in one run.

Knows nothing of running clusters: it starts a receiver process of its own.
"""
