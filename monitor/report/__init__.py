"""``trainermon report``: one offline page, and a verdict for programs, about what a job recorded."""
