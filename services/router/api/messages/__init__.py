"""Anthropic's Messages API: read as the chat request that asks for the same."""
