"""Costs from a cluster profile: fitted laws, residuals at measured sizes, other rank counts."""
