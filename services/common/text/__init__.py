"""Text: token ids from it, bytes back to it, stop strings in it. Used by the router and by the worker."""
