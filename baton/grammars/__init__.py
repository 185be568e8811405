"""Grammars in processes of their own: what a client's grammar costs is bounded, and it is killed where it costs more."""
