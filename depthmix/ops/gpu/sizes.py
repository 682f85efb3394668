"""Sizes of grids and blocks. Triton's functions of these names wrap their numbers as constants, which takes 3 µs a call."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, for n > 0."""
    return 1 << (n - 1).bit_length()
