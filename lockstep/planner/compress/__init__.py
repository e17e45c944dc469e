"""Gradients that travel compressed, in numbers: bytes, seconds of codecs, whether it pays."""
