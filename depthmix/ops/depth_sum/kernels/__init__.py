"""Triton kernels of weighted sums over depth: equations in the files, which are named after what they compute."""
