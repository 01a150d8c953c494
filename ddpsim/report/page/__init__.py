"""The HTML report: its figures, tables, timeline and words."""
