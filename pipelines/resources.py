"""What a task asks of the cluster: the one place that says so.

The local runner has one machine and passes over all of it.
"""

from kfp import kubernetes
from kfp.dsl import PipelineTask

ACCELERATOR = "nvidia.com/gpu"
NODE_POOL = {"label_key": "lathe/node-pool", "label_value": "gpu"}
TAINT = ACCELERATOR
RETRIES = 2
HOUR = 3600


def on_gpu(task: PipelineTask, hours: float, memory: str = "32Gi") -> PipelineTask:
    """One GPU of the node pool, room for the data loader's shared memory, retries, a deadline."""
    task.set_accelerator_type(ACCELERATOR).set_accelerator_limit(1)
    task.set_cpu_request("4").set_memory_request(memory)
    kubernetes.add_node_selector(task, **NODE_POOL)
    kubernetes.add_toleration(task, key=TAINT, operator="Exists", effect="NoSchedule")
    kubernetes.empty_dir_mount(
        task, volume_name="shm", mount_path="/dev/shm", medium="Memory", size_limit="8Gi"
    )
    return _with_patience(task, hours)


def on_cpu(task: PipelineTask, hours: float, memory: str = "8Gi") -> PipelineTask:
    """Four cores, retries, a deadline."""
    task.set_cpu_request("4").set_memory_request(memory)
    return _with_patience(task, hours)


def _with_patience(task: PipelineTask, hours: float) -> PipelineTask:
    kubernetes.set_timeout(task, int(hours * HOUR))
    return task.set_retry(
        RETRIES, backoff_duration="30s", backoff_factor=2.0, backoff_max_duration="600s"
    )
