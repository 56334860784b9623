"""Callbacks that attach the monitor to what a trainer trains."""
