"""What all of Lathe's packages stand on: errors, recipes, files and stores, provenance, pages."""

__version__ = "0.2.0"
