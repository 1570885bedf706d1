"""Settings, checkpoint facts and the arithmetic over them. Never imports torch."""
