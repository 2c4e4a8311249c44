"""Run the program as `python -m dg_lightning`."""

from dg_lightning.cli import main

if __name__ == "__main__":
    main()
