"""Jobs for tests, and what the engine makes of them."""
