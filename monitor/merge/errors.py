"""What stops a merge."""


class MergeError(Exception):
    """Nothing was merged. The message says what is wrong, and what to change."""
