"""What ROCm's profilers write, and what their wrappers in the root share."""
