"""Runs the draft model: context ids in, drafted ids and their laws out."""
