"""Runs a launcher as a process: `python -m tests.support.launch_trainjob JSON`.

JSON has the key `command` and optionally `shape` (nodes, processes), `settings` and `patience`.
"""

import json
import sys
from typing import Any

from lathe_base.config.settings import LaunchSettings
from lathe_base.console import log_to_stderr
from lathe_base.errors import StageError, UserError, coded
from lathe_launch.cluster import trainjob
from lathe_launch.cluster.follow import Patience
from lathe_launch.shape import Shape


def main(work: dict[str, Any]) -> None:
    log_to_stderr()
    shape = Shape(*work.get("shape", (1, 1)))
    settings = LaunchSettings(nodes=shape.nodes, **work.get("settings", {}))
    try:
        trainjob.run(work["command"], shape, settings, Patience(**work.get("patience", {})))
    except (UserError, StageError) as error:
        print(coded(error), file=sys.stderr)
        sys.exit(error.status)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
