"""Training: data, the loop, checkpoints, generation."""
