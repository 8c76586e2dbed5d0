"""`python -m jobsync` is `jobsync`."""

from jobsync.cli.main import main

if __name__ == "__main__":
    main()
