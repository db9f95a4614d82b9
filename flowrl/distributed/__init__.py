"""What makes a model trainable: adapters, snapshots of weights, and (across ranks) sharding and publication."""
