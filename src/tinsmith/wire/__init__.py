"""The wire formats: how types become bytes and bytes become types."""
