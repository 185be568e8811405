"""Addresses that nobody outside this machine reaches. Knows nothing of settings, so that a worker reads it fast."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
