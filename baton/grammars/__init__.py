"""Grammars in processes of their own: what one may cost is bounded, and it is killed where it costs more."""
