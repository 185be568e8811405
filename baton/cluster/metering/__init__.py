"""Metrics and spans of every process: what is measured, and how it leaves the process."""
