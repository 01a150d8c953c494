"""Hold simulations against real DDP iterations, and report what comes of it."""
