"""A lightweight monitor for the training state of large models: ``monitor.pytorch`` and ``monitor.mindspore`` attach it."""
