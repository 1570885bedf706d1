"""The messages rooms and router exchange, and the state machines behind them. Never imports torch."""
