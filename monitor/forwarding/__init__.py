"""Passes numbers of each step on to where people look: Weights & Biases, Prometheus, OpenTelemetry, or a function."""
