"""Benchmarks of the CPU engine, whose figures are shown as shares of what this machine can do at best."""
