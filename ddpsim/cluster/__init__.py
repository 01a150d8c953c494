"""What the ranks send over: topology, links, and what a collective costs on them."""
