"""Ours against the peers, in one run: `python -m benchmarks <entry>`, one entry per promise about speed or accuracy."""
