"""This project's own questions: claims of papers and their verdicts, theory, older studies. Not in the wheel; run from the repository's root."""
