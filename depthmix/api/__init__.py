"""The package in Python, for notebooks and scripts: each name is imported on first use by `depthmix` itself (docs/guides/python.md)."""
