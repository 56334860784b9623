"""What stops a conversion."""


class ConversionError(ValueError):
    """Nothing was converted. The message says what is wrong, and what to change."""
