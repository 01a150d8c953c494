"""The table of a zoo model: its layers, parameters and sizes, and the products in its rows."""
