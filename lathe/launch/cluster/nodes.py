"""What a node pool lacks."""

import urllib3
from kubernetes import client, config  # type: ignore[import-untyped]

from lathe.errors import StageError, UserError

LABEL = "lathe/node-pool"
GPU = "nvidia.com/gpu"


def node_pool_shortage(
    name: str, nodes: int, gpus: int, context: str | None = None
) -> UserError | None:
    """What a pool lacks for this many pods with this many GPUs each, which may share a node.

    GPUs in use count as well. A shortage need not be a mistake: autoscaled pools begin with no
    node.

    Args:
        context: kube context; the current one if None.

    Raises:
        StageError: the cluster could not be asked; the message says why.
    """
    try:
        api = client.CoreV1Api(config.new_client_from_config(context=context))
        found = api.list_node(label_selector=f"{LABEL}={name}", _request_timeout=10).items
    except config.ConfigException as error:
        raise StageError(f"no kube context: {error}") from None
    except client.ApiException as error:
        raise StageError(f"the cluster does not list its nodes: {error.reason}") from None
    except urllib3.exceptions.HTTPError as error:
        raise StageError(f"the cluster does not answer: {error}") from None
    if not found:
        return UserError(
            f"node pool {name}: no node has the label {LABEL}={name}",
            f"kubectl label node NODE {LABEL}={name}, or name another pool (NODE_POOL=)",
        )
    counts = [int((node.status.allocatable or {}).get(GPU, 0)) for node in found]
    if sum(count // gpus for count in counts) >= nodes:
        return None
    listed = ", ".join(
        f"{node.metadata.name} has {count}" for node, count in zip(found, counts, strict=True)
    )
    return UserError(
        f"node pool {name}: {nodes} pods with {gpus} GPUs each are wanted, and {listed}",
        "ask for fewer (NODES=, GPUS=), or for another pool (NODE_POOL=)",
    )
