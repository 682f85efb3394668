"""Models of transformers that mix over depth themselves, on this package's operators: one file per family of models."""
