"""The corridor: what two or more rooms need. Nothing here knows a room."""
