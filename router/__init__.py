"""The front door: HTTP in, jobs to the rooms, tokens out. No torch here. Read `flow.py` first."""
