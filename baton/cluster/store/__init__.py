"""Talks to Redis for every process: its URL, patience and room, leases, rate buckets and records."""
