"""From logits to a token: counter-based noise, filters, penalties, log-probabilities."""
