"""`python -m headstart`: the same as the `headstart` command."""

from headstart.cli import main

if __name__ == "__main__":
    main()
