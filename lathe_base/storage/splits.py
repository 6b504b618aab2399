"""The split of a data set that follows a path or an address: `folder::test`."""

import os
import re
from typing import NamedTuple

from lathe_base.storage.object_store import is_store


class Located(NamedTuple):
    """A path or address, and what follows it: `:config:split`, or nothing."""

    location: str
    suffix: str

    def part(self, config: str, split: str = "") -> str:
        """The address of a config, or of a split, for `locate`."""
        is_config_in_store = config and is_store(self.location)
        folder = f"{self.location.rstrip('/')}/" if is_config_in_store else self.location
        return f"{folder}:{config}{':' if split else ''}{split}"


def locate(source: str) -> Located:
    """Separate a path from `:config`, `::split` or `:config:split` after it.

    A path that exists is never separated. An address of a store is separated only at `::`, or at a
    colon after a slash, because keys contain colons, as in times; a prefix that ends in such a name
    is meant with a slash at the end. Other sources have no suffix.
    """
    if is_store(source):
        match = re.fullmatch(r"(.+/)((?::[^:/]*){1,2})|(.+)(::\w+)", source)
    elif os.path.lexists(source):
        return Located(source, "")
    else:
        match = re.fullmatch(r"(.+?)((?::[^:/]*){1,2})", source)
        match = match if match and os.path.exists(match[1]) else None
    return Located(*filter(None, match.groups())) if match else Located(source, "")
