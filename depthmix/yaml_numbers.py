"""Numbers that YAML 1.1, which PyYAML reads, takes for others than the reader sees: 010 is 8, 1:30 is 90, 1e-3 is text."""

from __future__ import annotations

import re

OCTAL = re.compile(r"[-+]?0[0-7_]+")
BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
# A number to YAML 1.2 and to everybody else; YAML 1.1 wants 1.0e-3.
EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


def misread_number(text: str) -> str:
    """Say what YAML takes a plain scalar for, where that is not the number one reads in it.

    Args:
        text: A scalar that YAML resolves to a number, as it stands in the file.

    Returns:
        What is wrong and what to write instead; "" for a number that means what it looks like.

    Example:
        >>> misread_number("010")
        'YAML reads 010 as the octal number 8: write 10, or quotes around text'
    """
    digits = text.replace("_", "")
    if OCTAL.fullmatch(text) and int(digits, 8) != int(digits):
        return f"YAML reads {text} as the octal number {int(digits, 8)}: write {int(digits)}, or quotes around text"
    if BASE_60.fullmatch(text):
        return f"YAML reads {text} as a number of base 60: write it in digits, or quotes around text"
    return ""
