"""What a host is, whether it is fit, and what stands on it."""
