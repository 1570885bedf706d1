"""The messages of rooms and router, and the state machines behind them. Never imports torch."""
