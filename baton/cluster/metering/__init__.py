"""Metrics and spans of every process: their definitions, and how they are exported."""
