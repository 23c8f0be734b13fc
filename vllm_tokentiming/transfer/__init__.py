"""Carries the draft's laws over to the target vocabulary as rows for the rejection sampler."""
