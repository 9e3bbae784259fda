"""Seeded faults over a running system, and a check of every client's stream against the undisturbed run.

Nothing here knows how the system recovers: it acts through signals and failpoints, and looks through the public API,
/proc and the journal.
"""
