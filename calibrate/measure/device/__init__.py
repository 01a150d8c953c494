"""One GPU or CPU core: kernels, what the host takes, steps of the zoo, and what surrounds them."""
