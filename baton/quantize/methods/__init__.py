"""One file per way of choosing what a weight is rounded to. Knows nothing of files or of models' names."""
