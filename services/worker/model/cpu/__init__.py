"""The fast path on CPU: a whole step of a Llama-shaped decoder in one call of compiled code, no torch in it."""
