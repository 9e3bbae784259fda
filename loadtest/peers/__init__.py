"""`make bench`: Orca and what a user would pick instead, on the same weights and machine, side by side."""
