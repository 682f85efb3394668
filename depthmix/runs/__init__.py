"""A run's folder: checkpoints, metrics, and the trained model in it."""
