"""The prefill room: a prompt in, its state and pages offered to a decode room."""
