"""Flow matching as pure tensors: no input or output, no configuration, no models, no processes."""
