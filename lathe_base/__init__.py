"""What all of Lathe's packages stand on: errors, recipes, files and stores, provenance, pages."""

__version__ = "0.2.0"
PACKAGES = ("lathe_base", "lathe_launch", "lathe_serving", "lathe", "lathe_paddle")
"""Lathe's packages, each above those that it may import."""
