"""Helpers for Redis: its URL, timeouts and free memory, leases, rate buckets and records."""
