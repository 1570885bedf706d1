"""Reading checkpoints by their official names, refusing leftovers and gaps."""
