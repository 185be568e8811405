"""A black-box judge of a running server that speaks OpenAI's API: by its answers alone, whoever wrote it."""
