"""The SDK: clients, their transport, and what keeps them from hanging."""
