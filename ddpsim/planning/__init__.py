"""Many scenarios: what to choose among them."""
