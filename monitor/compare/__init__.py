"""Two dumps, or two recorded runs, against each other."""
