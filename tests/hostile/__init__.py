"""Hostile but realistic commands, as a table: nothing of the user's may be lost, leaked or silently
wrong. `python -m tests.hostile` prints the verdicts of all cases."""
