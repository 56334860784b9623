"""What ranks wrote as CSV, for other programs: curves for TensorBoard, and a database for SQL."""

from monitor.convert.database import CSV2DBConfig, csv2db
from monitor.convert.errors import ConversionError
from monitor.convert.events import csv2tensorboard_by_step
from monitor.convert.outcome import Converted

__all__ = ["CSV2DBConfig", "ConversionError", "Converted", "csv2db", "csv2tensorboard_by_step"]
