"""A real protein, and what prepares others."""
