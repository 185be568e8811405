"""Host names and addresses that only this machine reaches.

Imports no settings, so that a worker starts fast.
"""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
