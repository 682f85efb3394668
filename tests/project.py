"""The project's files, and running code as someone outside would."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(code, *, interpreter=sys.executable, cwd=None):
    return subprocess.run([str(interpreter), "-c", code], capture_output=True, text=True, check=True, cwd=cwd).stdout


def code_blocks(path):
    """The Python blocks of a Markdown file."""
    return [block.split("```")[0] for block in path.read_text().split("```python\n")[1:]]
