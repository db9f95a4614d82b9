"""Rewards: one scorer a file, what a failure means, and a pool of processes that scores while pictures are drawn."""
