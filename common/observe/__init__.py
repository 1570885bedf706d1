"""Logs and metrics. Never imports torch."""
