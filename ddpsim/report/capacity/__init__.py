"""Plans of how many GPUs, as text on one screen."""
