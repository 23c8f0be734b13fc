"""Single stages of a decoding cycle, timed alone."""
