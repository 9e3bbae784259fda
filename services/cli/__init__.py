"""The `orca` command."""
