"""Executors: run one step on a device. Behind a message seam: rows in, samples out."""
