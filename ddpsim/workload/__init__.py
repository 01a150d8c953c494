"""What one rank computes: the model's work, its buckets, and DDP's own costs."""
