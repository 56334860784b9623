"""``trainermon run``: monitors a command that trains, without a change of its code."""
