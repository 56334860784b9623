"""What the rooms of both frameworks share: all of watching a training loop that touches no tensor itself."""
