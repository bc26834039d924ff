__title__ = "tinsmith"
__version__ = "0.1.0"

PROTOCOL_VERSION = "0.38.0"
"""The release of the official client whose wire behaviour we follow. Servers choose their flags by it."""
