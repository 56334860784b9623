"""What went wrong in the numbers: rules while training runs, their events on disk, and which of them came first."""
