"""Anomaly detection: alert rules that judge each step, their events on disk, and a ranking that finds the first fault."""
