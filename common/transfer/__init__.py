"""Publish, fetch, release: moving state between rooms and proving that it arrived."""
