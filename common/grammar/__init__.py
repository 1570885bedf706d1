"""Grammars that answers must follow: compiled, kept, and asked for masks. Never imports torch."""
