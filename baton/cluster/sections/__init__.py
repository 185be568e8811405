"""The config's sections, a file for each noun. ``baton.cluster.config`` gives them out; import them from there."""
