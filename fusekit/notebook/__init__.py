"""Notebooks: the magic, and a small pretrained model to try things on."""
