"""The project's own questions: claims of papers and their verdicts, theory, older studies.

The wheel leaves this folder out. Run its programs from the repository's root.
"""
