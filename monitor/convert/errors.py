"""What stops a conversion."""


class ConversionError(ValueError):
    """Nothing was converted. The message says what is wrong, and what to change."""


class NothingRecordedError(ConversionError):
    """The ranks' directories can be read, and hold no CSV rows."""
