"""Between chat messages and token ids, both ways."""
