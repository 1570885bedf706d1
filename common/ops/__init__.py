"""Numeric operations: a torch definition (`reference`) each and, where it pays, faster bodies."""
