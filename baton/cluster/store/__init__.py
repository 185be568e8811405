"""What Redis is to every process: its URL, its patience and room, leases, rate buckets and records."""
