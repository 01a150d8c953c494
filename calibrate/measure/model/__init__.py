"""A model on one device: its profile, and the user's code that makes it."""
