"""Top-k traces: recorder, generator and policy simulator. Nothing is here yet."""
