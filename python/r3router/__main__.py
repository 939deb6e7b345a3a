"""`python -m r3router`."""

from r3router.cli import main

if __name__ == "__main__":
    main()
