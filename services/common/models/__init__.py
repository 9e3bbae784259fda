"""Models on disk: where they come from, what they are, which tokenizer they have."""
