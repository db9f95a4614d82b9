"""`python -m flowrl`."""

from flowrl.cli.train import main

if __name__ == "__main__":
    main()
