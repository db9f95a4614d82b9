"""What only several GPUs of one host can show, with the command's own classes under `launcher=spawn`."""
