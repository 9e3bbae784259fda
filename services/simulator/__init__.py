"""Runs the production scheduler core against a virtual clock and a model of step time. Nothing here decides: the core
does, as in a cluster; this package brings arrivals, durations and reports.
"""
