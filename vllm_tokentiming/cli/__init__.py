"""The ``tokentiming`` command."""
