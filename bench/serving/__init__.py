"""Servers under load over HTTP, ours and others, by one client."""
