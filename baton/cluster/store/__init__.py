"""Helpers for Redis: its URL, connections, timeouts and free memory, leases, rate buckets and records."""
