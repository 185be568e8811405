"""``baton bench kv``: every way that KV takes, beside what the machine can do at all, in one run.

Knows nothing of running clusters: it starts a receiver process of its own.
"""
