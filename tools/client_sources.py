"""Write the digests of installed clients' functions to `evoattn/clients/sources.json`: client_sources.py NAME ..."""

import json
import sys

from evoattn.clients.registry import SOURCES, client, sources
from evoattn.clients.releases import digest


def main(names: list[str]) -> None:
    """Add the installed release of each client, or replace its digests."""
    for name in names:
        of, digests = client(name), {}
        for site in (*of.sites, *of.layers, *of.steps, *of.command):
            function = site.find()[2]
            if function is None:
                sys.exit(f"{name} {of.installed} has no {site}")
            digests[str(site)] = digest(function)
        sources().setdefault(name, {})[str(of.installed)] = digests
    SOURCES.write_text(json.dumps(sources(), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
