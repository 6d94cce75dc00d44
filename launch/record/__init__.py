"""What is kept of a run, and how runs are compared."""
