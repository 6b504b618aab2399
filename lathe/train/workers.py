"""This process among those that torchrun started, if any: its rank, its device and the CPUs beside
it, and its place in the mesh."""

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# The names of torch.distributed, which does not export them to type checkers.
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from lathe.train.group import missing_gpu
from lathe.train.heartbeats import Heartbeats, meet, wait_for
from lathe.train.layout import DIMS, mesh_shape
from lathe.train.nccl import log_network
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

_GROUPS = itertools.count()
SYSTEM = Path("/sys")

T = TypeVar("T")


@dataclass(frozen=True)
class Workers:
    """Rank and number of the processes, the device that this one computes on, and their mesh.

    Attributes:
        mesh: of `DIMS`; along `dp` and `sharding` the batch is divided, along `mp` every linear,
            along `pp` the layers.
        files: a group of all processes on the CPU, for files that are written and read during
            training.
        timeout: of collectives, and of the first process's silence while it works alone.
        store, heartbeats: None in a group of one.
        network: NCCL's name of its network between nodes, in the first process; None if unknown.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    files: dist.ProcessGroup
    timeout: timedelta = timedelta(minutes=30)
    store: Store | None = None
    heartbeats: Heartbeats | None = None
    network: str | None = None
    _turns: Iterator[int] = field(default_factory=itertools.count)

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Parts into which a global batch is divided."""
        return self.mesh["dp"].size() * self.mesh["sharding"].size()

    @property
    def data_rank(self) -> int:
        """Index of the part of a global batch that this process computes."""
        return self.at("dp") * self.mesh["sharding"].size() + self.at("sharding")

    def at(self, dim: str) -> int:
        """This process's coordinate in a dimension of the mesh."""
        return self.mesh.get_local_rank(dim)

    def sum(self, values: Tensor) -> Tensor:
        """Sum in place over all processes."""
        dist.all_reduce(values)
        return values

    def read(self, values: Tensor) -> Callable[[], list[float]]:
        """Begin to copy values (n,) to the host; what is returned waits until they are there, but
        not for what the device was given to compute after this call."""
        values = values.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        if self.device.type != "cuda":
            return values.tolist
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def wait() -> list[float]:
            copied.synchronize()
            return values.tolist()

        return wait

    def agree(self, value: Callable[[], T]) -> T:
        """Broadcast the first process's result to all. It is pickled, but only between Lathe's own
        processes.

        The others wait outside of the collective, whose timeout would end the work of the first,
        for as long as that one has a heartbeat.

        Raises:
            StageError: it has had none for `timeout`.
        """
        done = f"agree {next(self._turns)}"
        values: list[Any] = [value() if self.is_first else None]
        if self.store is not None and self.heartbeats is not None:
            if self.is_first:
                self.store.set(done, "")
            store, seconds = self.store, self.timeout.total_seconds()
            wait_for(lambda: store.check([done]), lambda: [0], store, self.heartbeats, seconds)
        dist.broadcast_object_list(values, src=0, group=self.files)
        result: T = values[0]
        return result

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors on the CPU by those of the first process."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0, group=self.files)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank; pickled and waited for as in `agree`."""
        self._meet()
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.files)
        return gathered

    def barrier(self) -> None:
        """Wait for all processes, as in `agree`."""
        self._meet()
        dist.barrier(self.files)

    def _meet(self) -> None:
        """Return when all processes have called it: one may upload a checkpoint, or verify it, for
        longer than a collective may take."""
        key = f"meet {next(self._turns)}"
        if self.store is not None and self.heartbeats is not None:
            seconds = self.timeout.total_seconds()
            meet(key, self.rank, self.size, self.store, self.heartbeats, seconds)


@contextmanager
def join_workers(recipe: Recipe) -> Iterator[Workers]:
    """Join the process group that torchrun's environment describes; a group of one without it. It
    may be called again after a group has ended.

    Raises:
        UserError: the recipe's degrees do not multiply to the number of processes.
    """
    device = choose_device(recipe)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mesh_shape(recipe.Distributed, size)  # before the processes wait for each other
    if device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        bind_to_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # GPUs exchange tensors with NCCL, and CPU tensors, such as those of saved states, go by gloo.
    store, timeout = _store(), timedelta(minutes=recipe.Distributed.timeout_minutes)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        with ExitStack() as stack:
            mesh = make_mesh(recipe, device)
            files = dist.new_group(backend="gloo")
            # A mesh's groups have their backend's own timeout, of 10 minutes with NCCL.
            for group in dist.distributed_c10d._world.pg_map:
                dist.distributed_c10d._set_pg_timeout(timeout, group)
            network = log_network(device, rank, size)
            heartbeats, poll_store = None, None
            if size > 1:
                clone = store.clone  # type: ignore[attr-defined]  # which its type lacks
                heartbeats = stack.enter_context(Heartbeats(clone(), rank, size))
                poll_store = clone()  # requests of one client wait for each other
            stack.enter_context(
                deterministic(device.type == "cuda" and recipe.Engine.deterministic)
            )
            yield Workers(rank, size, device, mesh, files, timeout, poll_store, heartbeats, network)
    finally:
        dist.destroy_process_group()


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Use only deterministic CUDA kernels, so that two runs of the same steps are bitwise equal.

    Attention uses FlashAttention, whose backward pass is deterministic in this mode; cuDNN's, which
    torch prefers on Hopper, is not.
    """
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    fills: Any = torch.utils.deterministic
    kernels: Any = torch.backends.cuda  # neither is typed
    had_cudnn, filled = kernels.cudnn_sdp_enabled(), fills.fill_uninitialized_memory
    kernels.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    fills.fill_uninitialized_memory = False  # a debugging aid, which writes every buffer once more
    try:
        yield
    finally:
        kernels.enable_cudnn_sdp(had_cudnn)
        torch.use_deterministic_algorithms(False)
        fills.fill_uninitialized_memory = filled


@contextmanager
def tensor_float32(device: torch.device) -> Iterator[None]:
    """Let a GPU round the factors of float32 matrix products to TF32, as training allows: eight
    times as fast, with float16's precision and float32's range."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_mesh(recipe: Recipe, device: torch.device) -> DeviceMesh:
    """The mesh of all processes of the default group."""
    shape = mesh_shape(recipe.Distributed, dist.get_world_size())
    return init_device_mesh(device.type, shape, mesh_dim_names=DIMS)


def _store() -> Store:
    """A separate store prefix for every group, because a store keeps what earlier groups wrote."""
    if "RANK" not in os.environ:
        return HashStore()
    return PrefixStore(f"lathe {next(_GROUPS)}", _shared_store())


@functools.cache
def _shared_store() -> Store:
    store: Store = next(rendezvous("env://"))[0]
    return store


def choose_device(recipe: Recipe) -> torch.device:
    """The device of `Global.device`: a GPU exclusive to this process, if there is one.

    Raises:
        UserError: the recipe requests a GPU, by Global.device or Launch.gpus_per_node, but torch
            finds none.
    """
    wanted = recipe.Global.device
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if wanted == "auto" and not recipe.Launch.gpus_per_node:
            return torch.device("cpu")
        raise missing_gpu(recipe, f"torch {torch.__version__}", torch.version.cuda is not None)
    local_rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"Distributed starts {local_rank + 1} or more processes on this machine, but torch "
            "finds "
            f"{count} GPUs",
            "lower the degrees, or request as many GPUs (Launch.gpus_per_node)",
            Code.NO_GPU,
        )
    device = torch.device("cuda", local_rank)
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        # A step's blocks of memory differ in size, and validation's from both; segments that grow
        # leave no holes between them. Read when CUDA starts.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.set_device(device)
    return device


def bind_to_gpu(device: torch.device) -> None:
    """Bind this process and its later threads to the CPUs of the GPU's NUMA node, as far as it may
    use them; nothing happens where the machine does not say which they are. A CPU of another socket
    starts kernels later, and memory that it has pinned is copied over the link between the sockets.

    `torchrun --numa-binding` does the same with the program numactl, which the image does not have.
    """
    properties = torch.cuda.get_device_properties(device)
    names = "pci_domain_id", "pci_bus_id", "pci_device_id"  # which torch's stubs do not have
    address = "{:04x}:{:02x}:{:02x}.0".format(*(getattr(properties, name) for name in names))
    try:
        node = int((SYSTEM / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        listed = (SYSTEM / f"devices/system/node/node{node}/cpulist").read_text(
            encoding="ascii"
        )  # 0-3,8-11
    except OSError:  # no such files in this container, or one node, whose number is -1
        return
    # Only what a container or the user has left to this process, and not what takes nothing away.
    near = set[int]()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        near |= set(range(int(first), int(last or first) + 1))
    allowed = os.sched_getaffinity(0)
    if near & allowed and not allowed <= near:
        os.sched_setaffinity(0, near & allowed)
        log.debug("bound to %d CPUs of NUMA node %d, beside %s", len(near & allowed), node, device)
