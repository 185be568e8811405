"""What operators' own tools show of Baton, made from the metric definitions: Grafana, Prometheus, the reference."""
