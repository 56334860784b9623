"""``trainermon top``: a running job in a terminal, from the files that its ranks write."""
