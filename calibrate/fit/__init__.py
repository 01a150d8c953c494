"""From measurements to a cluster profile: fit, residuals, and a profile in words."""
