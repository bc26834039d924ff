"""Text to token ids and back, and conversations as prompts: for both halves."""
