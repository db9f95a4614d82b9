"""Servers of rewards: whatever scores, in an environment or on a machine of its own."""
