"""`python -m bothways` is the command `bothways`."""

from bothways.cli import main

if __name__ == "__main__":
    main()
