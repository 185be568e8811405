"""A black-box judge of a running server with OpenAI's API: it checks any implementation by its answers alone."""
