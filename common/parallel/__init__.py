"""Ranks and axes as an explicit object, and the collectives over them."""
