"""The recipes that ship with Lathe."""
