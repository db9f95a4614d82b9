"""Checkpoints as folders of files: tensors as safetensors, the rest as documents, nothing that is ever unpickled."""
