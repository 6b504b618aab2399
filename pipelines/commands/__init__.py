"""Shared parts of local and cluster commands: options, checks of inputs, tables, errors."""
