"""``baton bench kv``: benchmarks every path that KV can take, beside the machine's limits, in one run.

It needs no running cluster: it starts a receiver process of its own.
"""
