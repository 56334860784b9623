"""Why nothing was compared."""


class ComparisonError(Exception):
    """The message names the place, the reason and what to do."""
