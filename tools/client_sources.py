"""Print the digests of installed clients' functions, for `evoattn.clients.sources`: client_sources.py NAME ..."""

import sys

from evoattn.clients.patching import client
from evoattn.clients.releases import digest


def main(names: list[str]) -> None:
    """A block of lines a client."""
    for name in names:
        of = client(name)
        print(f'    "{name}": {{\n        "{of.installed}": {{')
        for site in (*of.sites, *of.layers, *of.steps):
            function = site.find()[2]
            if function is None:
                sys.exit(f"{name} {of.installed} has no {site}")
            print(f'            "{site}": "{digest(function)}",')
        print("        },\n    },")


if __name__ == "__main__":
    main(sys.argv[1:])
