"""What the commands for both have in common: options, checks of inputs, tables, errors."""
