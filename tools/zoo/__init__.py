"""The zoo: the names of its models, and how each is built."""
