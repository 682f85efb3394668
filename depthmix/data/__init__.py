"""Corpora in, tokens out; images in, pixels out."""
