"""What a training loop does around forward, backward and optimizer."""
