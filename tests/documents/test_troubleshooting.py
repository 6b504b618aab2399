"""Messages of Lathe that docs/how-to/troubleshooting.md explains are in its code."""

import re

from tests.documents.pages import TEXTS
from tests.support.sources import python_files

PAGE = TEXTS["docs/how-to/troubleshooting.md"]
OTHERS = re.compile(
    r"PodSecurity|Insufficient|didn't match|Pending|exceeded quota|Suspended|ErrImagePull"
    r"|ImagePullBackOff|Bus error|lookup mlpipeline|Init:|0/2|not found$|protocol is restricted"
    r"|unable to get metric|pipelines\.kubeflow\.org"
)
"""Messages and states of Kubernetes, Pipelines, Triton and the kernel."""
VALUES = re.compile(
    r"\.\.\.|\d+|http://\S+|LATHE_KFP_TOKEN_FILE=|lathe/node-pool=|trainjobs\.trainer\.kubeflow\.org"
)
"""Parts of the messages that the code inserts."""


def code() -> str:
    """The text of the packages, with the parts of strings joined."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in python_files())
    text = re.sub(r"\"\s+f?\"", "", text)
    return re.sub(r"\{[^{}\n]*\}", "...", text)


def messages() -> list[str]:
    symptoms = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    found = [message for symptom in symptoms for message in re.findall(r"`([^`]+)`", symptom)]
    return [message for message in found if not OTHERS.search(message)]


def test_messages_are_those_of_the_code() -> None:
    text, found = code(), messages()
    assert len(found) >= 15
    for message in found:
        parts = [part.strip(" :()") for part in VALUES.split(message)]
        assert all(part in text for part in parts), message
