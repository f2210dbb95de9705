"""The version, as pyproject.toml has it; a folder on Python's path has no other."""

__version__ = "0.1.0"
