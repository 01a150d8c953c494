"""Options of one strategy or of one hook, as the ddp section has them."""
