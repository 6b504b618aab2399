"""What the steps of a run have used, for its report."""

import logging
import os
import re
from collections.abc import Mapping

from kfp import dsl

from components import tracking
from lathe.report.results import read_results
from lathe_base.errors import StageError, UserError
from lathe_launch.usage import Usage

log = logging.getLogger("lathe")

LOCAL_RUN = re.compile(r"-\d{4}(?:-\d\d){5}-\d{6}$")
"""The end of the name that KFP's local runner gives a run's folder."""


def run_usage(output: dsl.Artifact) -> Mapping[str, Usage]:
    """What the steps of this run have used that have finished; empty, with a warning, if their
    metrics cannot be read.

    Args:
        output: an output of this step, whose address shows where those of the run are.
    """
    run = os.environ.get("KFP_RUN_ID")
    parts = (output.uri if run else output.path).split("/")
    if run in parts:
        location = "/".join(parts[: parts.index(run) + 1]) + "/"
    elif len(parts) > 3 and LOCAL_RUN.search((below := tracking.below_root(parts))[0]):
        location = "/".join(parts[: -len(below)])
    else:  # called outside of a run
        return {}
    try:
        return read_results(location).usage
    except (UserError, StageError) as error:
        log.warning("the report does not show what the steps have used: %s", error)
        return {}
