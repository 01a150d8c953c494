"""Links, and the paths between ranks."""
