"""Dynamic Token Warping: which draft token each proxy token came from."""
