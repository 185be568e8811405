"""What a worker says of its load: rates, energy, and the figures of its engine and its transfers."""
