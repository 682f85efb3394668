"""Corpora in, tokens out."""
