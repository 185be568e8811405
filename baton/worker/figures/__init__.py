"""Figures of a worker's load: rates, energy, and those of its engine and its KV transfers."""
