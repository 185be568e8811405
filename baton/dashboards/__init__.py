"""Grafana dashboard, Prometheus rules and the metrics' reference, generated from the metric definitions."""
