"""A model on many devices, by PyTorch's own engine, applied from outside: no model file knows of it."""
