"""Beyond one GPU."""
