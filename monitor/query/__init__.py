"""Reads recorded runs: ``open_run`` for programs, ``trainermon query`` for a shell."""
