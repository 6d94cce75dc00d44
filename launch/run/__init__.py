"""What is started, and how it is watched and ended."""
