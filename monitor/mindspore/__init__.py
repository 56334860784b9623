"""The monitor for MindSpore."""
