"""Options of one strategy, of one hook, or of the training loop."""
