"""Numeric operations: each family has a torch definition (`reference`) and, where it pays, faster bodies."""
