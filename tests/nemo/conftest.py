"""What is inside runs in an environment of its own: test_bridge.py."""

collect_ignore = ["inside"]
