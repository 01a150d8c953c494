"""From measurements to a cluster profile."""
