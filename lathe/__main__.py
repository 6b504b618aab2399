"""`python -m lathe`: the command line, also for the workers that torchrun starts."""

from lathe.cli import main

main()
