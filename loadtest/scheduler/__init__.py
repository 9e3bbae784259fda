"""What a decision costs: our scheduler core alone, and vLLM's beside it."""
