"""Grammars in processes of their own: the cost of each is bounded, and it is killed if it exceeds the bounds."""
