"""The C ABI through which each op's ``cpu.cpp`` is exported: building the library, and calling it from Python."""
