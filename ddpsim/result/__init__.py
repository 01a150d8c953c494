"""What came out: the timeline, its figures, and the result that users read."""
