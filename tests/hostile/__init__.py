"""A table of hostile but realistic commands, none of which may destroy or leak the user's data or
accept wrong input silently. `python -m tests.hostile` prints the verdicts."""
