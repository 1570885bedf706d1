"""The front door: HTTP in, jobs to the rooms, tokens out. Never imports torch. Read `flow.py` first."""
