"""Afterwards: the events of all ranks in the order in which they happened, and which of them came of nothing before."""
