"""Rooms that die, stop, leave or compute nonsense under real requests."""
