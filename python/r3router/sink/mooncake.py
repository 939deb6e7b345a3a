"""Rows in a Mooncake store, as SGLang's own output store writes them and newer miles reads them (package mooncake-transfer-engine).

One object a sample: a flat dict whose field `routed_experts` is int32 `[1, rows, layers, top_k]`, hard-pinned, since its reference is on
its way to a reader. The reader removes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Options:
    """Where the store is. The defaults of `key_prefix` and `namespace` are those with which miles reads."""

    master: str
    """`host:port` of the master."""
    hostname: str = "127.0.0.1"
    """Under which the store's other members reach this process."""
    protocol: str = "tcp"
    device: str = ""
    metadata: str = "P2PHANDSHAKE"
    buffer_bytes: int = 512 << 20
    """Memory that rows are staged in on their way."""
    key_prefix: str = "miles-object-store"
    namespace: str = "default"
    replicas: int = 1


class Mooncake:
    """A client of a Mooncake store that holds none of its memory. Safe for several threads."""

    def __init__(self, options: Options) -> None:
        """Connects.

        Raises:
            RuntimeError: the package cannot be imported here, or the master does not answer.
        """
        try:
            from mooncake import structured_object_store as objects
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise RuntimeError(
                f"the package mooncake-transfer-engine (or …-non-cuda) cannot be used, it needs libibverbs1 too: {error}"
            ) from error
        store = MooncakeDistributedStore()
        failed = store.setup(
            {
                "local_hostname": options.hostname,
                "metadata_server": options.metadata,
                # The store's memory is its other members'.
                "global_segment_size": 0,
                "local_buffer_size": options.buffer_bytes,
                "protocol": options.protocol,
                "rdma_devices": options.device,
                "master_server_addr": options.master,
            }
        )
        if failed:
            raise RuntimeError(f"the Mooncake master at {options.master} cannot be joined: error {failed}")
        self._objects = objects
        self._config = ReplicateConfig()
        self._config.replica_num = options.replicas
        self._config.with_hard_pin = True
        self._transfer = objects.MooncakeBundleTransfer(store, key_prefix=options.key_prefix)
        self._namespace = options.namespace

    def put(self, field: str, rows: NDArray[np.int32]) -> dict[str, Any]:
        """Puts rows; the handle that JSON can carry. Blocks for as long as it takes.

        Raises:
            Exception: whatever the store says; nothing is left behind then that anybody could name.
        """
        schema = self._objects.FieldSchema(codec="auto", nullable=False, metadata={"section": "batch"})
        made = self._transfer.put(
            {field: rows[None]},
            type="dict",
            namespace=self._namespace,
            partition="default",
            config=self._config,
            field_schemas={field: schema},
        )
        handle: dict[str, Any] = self._objects.export_ref(made)
        return handle

    def remove(self, handle: dict[str, Any]) -> None:
        """Removes what `put` made; nothing happens when a reader has removed it already."""
        self._transfer.cleanup_dataproto(self._objects.import_ref(handle))
