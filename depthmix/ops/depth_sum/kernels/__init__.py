"""Triton kernels of weighted sums over depth. Files are named after what they compute and state its equations."""
