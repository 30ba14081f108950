"""Which operators of a training step could be one kernel, and what that would save."""
