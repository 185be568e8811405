"""``baton doctor``: checks whether this machine can run what the configuration asks of it."""
