"""Redis: keys, the function library, and its typed client. All state that outlives a process is behind this."""
