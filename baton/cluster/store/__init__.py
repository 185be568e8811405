"""Helpers for Redis: its URL, connections, timeouts and free memory, leases, rate buckets, records, and values that
stay when it restarts empty.
"""
