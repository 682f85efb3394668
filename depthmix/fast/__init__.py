"""Faster ways to run rules: kernels in training, slots in decoding.

A rule (depthmix/mixers) says what it computes. A `FastPath` computes the same on states of its own type, so the type of a state says
how the pass runs. A rule names its paths as strings ("module:NAME"), which are imported when a mixer of that rule is built.
"""
