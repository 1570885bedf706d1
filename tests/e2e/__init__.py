"""tests/e2e"""
