"""What stops a merge."""


class MergeError(Exception):
    """Nothing was merged. The message says what is wrong, and what to change."""


class NothingRecordedError(MergeError):
    """The ranks of the job can be read, and have recorded no row."""
