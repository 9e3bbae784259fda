"""What a router decides and emits, without sockets or Redis."""
