"""What touches the world: hosts, processes, files outside the checkout. Nothing else in this repository does."""
