"""Predict from counted FLOPs and bytes what a recipe needs, and how fast it would run, on GPUs that are not at hand."""
