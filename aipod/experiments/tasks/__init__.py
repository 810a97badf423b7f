"""The experiments of the command, one in each file."""
