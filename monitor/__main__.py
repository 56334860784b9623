"""``python -m monitor`` is the command ``trainermon``."""

from monitor.cli import app

if __name__ == "__main__":
    app(prog_name="trainermon")
