"""Results as people and programs read them; computes nothing new."""
