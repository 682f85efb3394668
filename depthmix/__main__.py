"""Entry point of `python -m depthmix`, the same as `depthmix`."""

import sys

from depthmix.cli import main

sys.exit(main())
