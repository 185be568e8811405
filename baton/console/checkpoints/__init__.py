"""Commands about checkpoints: what is made of one, and what that costs in answers."""
