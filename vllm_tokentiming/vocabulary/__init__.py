"""Tokenizers as byte tables: draft contexts, proxy tokens, special tokens."""
