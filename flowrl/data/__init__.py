"""Prompt files in, groups out."""
