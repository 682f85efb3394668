"""Data: text to tokens, images to pixels."""
