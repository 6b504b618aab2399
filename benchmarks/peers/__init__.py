"""Engines that run the same models on the CPU, each in one module with the same interface.

`league.py` starts a process for each of them, in an environment with its packages.
"""
