"""Reads of one site when few tokens are decoded: everything between two sublayers in one launch. No gradients."""
