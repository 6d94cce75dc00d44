"""What is inside runs in environments of its own: test_exported.py."""

collect_ignore = ["inside"]
