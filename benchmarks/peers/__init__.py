"""Engines that run the same GPT-2 on the CPU, each in one module with the same four methods.

`league.py` starts a process for each of them, in an environment that has its packages.
"""
