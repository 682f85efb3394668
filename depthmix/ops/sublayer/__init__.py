"""Elementwise work of sublayers between their matrix products, for passes without gradients."""
