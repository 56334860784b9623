"""What ranks wrote as CSV, for other programs: curves for TensorBoard, and a database for SQL."""

from monitor.convert.conversion import ConversionError, Converted
from monitor.convert.sqlite import CSV2DBConfig, csv2db
from monitor.convert.tensorboard import csv2tensorboard_by_step

__all__ = ["CSV2DBConfig", "ConversionError", "Converted", "csv2db", "csv2tensorboard_by_step"]
