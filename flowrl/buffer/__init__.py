"""The replay buffer between rollout and actor."""
