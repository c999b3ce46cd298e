"""Proposers guess the next tokens. One file each; the configuration's `speculative.method` is the file's name."""
