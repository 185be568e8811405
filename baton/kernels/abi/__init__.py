"""Holds the C ABI that every op's ``cpu.cpp`` exports through: how it is built, and how Python reaches it."""
