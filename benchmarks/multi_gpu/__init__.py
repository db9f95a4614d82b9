"""What only several GPUs of one host can show, with the command's own classes under `launcher=spawn`."""

import os

# Parts are forked. Counting GPUs by the CUDA runtime, as some libraries do when they are imported, would spoil that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
