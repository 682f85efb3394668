"""Pages to look at: what a run's layers read from each other, in a browser."""
