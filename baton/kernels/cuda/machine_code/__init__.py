"""Checks of compiled machine code: instructions that the sources intend, and how many blocks are resident."""
