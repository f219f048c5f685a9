"""``python -m proteins.train fit --config config.yaml``."""

from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

from proteins.data import Proteins
from proteins.model import NextResidue


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    """Run one of Lightning's subcommands, by default those of the command line."""
    args = None if arguments is None else list(arguments)
    return LightningCLI(NextResidue, Proteins, args=args, save_config_callback=None)  # it would refuse to run twice


if __name__ == "__main__":
    main()
