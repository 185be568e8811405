"""What the compiled machine code shows: instructions that the sources intend, and how many blocks are resident."""
