"""How fast the CPU engine is beside what this machine can do at all."""
