"""OpenAI's Responses API: read as the chat request that asks for the same, and kept for a while."""
