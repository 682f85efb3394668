"""Compare our kernels with the published ones in one run: `python -m benchmarks <entry>`.

There is one entry per promise about speed or accuracy.
"""
