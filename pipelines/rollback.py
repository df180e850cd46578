"""`python -m pipelines.rollback`: make another version of a route's drafter current.

The version before, or `online.version`; of `online.route`. A server takes it at its next look.
"""

from draftkit.config import Config

from .command import run_command
from .service import registry_of


def rollback(config: Config) -> None:
    """Raises ValueError where there is no such version."""
    options = config.online
    version = registry_of(config, options.route).rollback(options.version, reason="by command")
    print(f"rollback: {options.route} is back at {version.name}")


if __name__ == "__main__":
    run_command("rollback", rollback)
