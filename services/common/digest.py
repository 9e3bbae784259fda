"""What identifies the content of a KV block: a hash chained over all tokens before it, salted by tenant and adapter.

SHA-256, because a collision would give one user another's KV.
"""

import hashlib


def root(tenant: str, adapter: str) -> bytes:
    """Where chains begin: separates tenants and adapters. The lengths keep ("ab", "c") and ("a", "bc") apart."""
    names = (tenant.encode(), adapter.encode())
    return hashlib.sha256(b"".join(b"%d:%b" % (len(name), name) for name in names)).digest()


def chain(parent: bytes, content: bytes) -> bytes:
    """The digest of a full block. content: its token ids, as unsigned 32-bit integers of this machine's byte order."""
    return hashlib.sha256(parent + content).digest()
